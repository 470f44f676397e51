"""Files that were made to run something when they are read are refused, and run nothing.

Those of a checkpoint: tests/checkpoint/test_safe_loading.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_fp8.checkpoint.manifest import Manifest, read_manifest, write_manifest
from megatron_fp8.checkpoint.saved_model import read_config
from megatron_fp8.config.load import load_config
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.data.blend import Blend
from megatron_fp8.data.order import build_order, load_order, save_order
from megatron_fp8.data.token_file import TokenFileError, idx_path, read_index
from megatron_fp8.data.tokenizer import Tokenizer, TokenizerError
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf.weights import read_folder
from megatron_fp8.prepare.token_file_writer import TokenFileWriter


class Foreign:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "ran"


def test_the_poison_works(marker: Path) -> None:
    """Else the refusals below would say nothing."""
    pickle.loads(pickle.dumps(Foreign(marker)))
    assert marker.exists()


def plain_pickle(path: Path, marker: Path) -> None:
    """numpy takes what is no array for a pickle, where it may."""
    path.write_bytes(pickle.dumps(Foreign(marker)))


def array_of_objects(path: Path, marker: Path) -> None:
    array = np.empty(1, dtype=object)
    array[0] = Foreign(marker)
    np.save(path, array, allow_pickle=True)


def archive_of_objects(path: Path, marker: Path) -> None:
    array = np.empty(1, dtype=object)
    array[0] = Foreign(marker)
    with path.open("wb") as file:
        np.savez(file, documents=array)


@pytest.fixture
def indices(tmp_path: Path) -> Path:
    """A directory of sample indices, as it lies beside the token files, and a token file."""
    with TokenFileWriter(tmp_path / "text", 100) as writer:
        writer.add_documents(np.arange(90, dtype=writer.dtype), [40, 50])
    directory = tmp_path / "cache"
    directory.mkdir()
    save_order(build_order(Blend((str(tmp_path / "text"),), None), 8, 1234, 10), directory, "train")
    return directory


@pytest.mark.parametrize("part", ["documents", "samples", "shuffle"])
@pytest.mark.parametrize("poison", [plain_pickle, array_of_objects, archive_of_objects])
def test_sample_indices_of_others(indices: Path, marker: Path, poison: Callable[[Path, Path], None], part: str) -> None:
    """Their directory may lie on a disk that many write to, and its name can be known beforehand."""
    load_order(indices, "train", 1)
    poison(indices / f"train-0-{part}.npy", marker)
    with pytest.raises(BadInputError, match=f"train-0-{part}.npy cannot be read"):
        load_order(indices, "train", 1)
    assert not marker.exists()


def test_an_index_of_tokens_that_is_a_pickle(indices: Path, tmp_path: Path, marker: Path) -> None:
    idx_path(tmp_path / "text").write_bytes(pickle.dumps(Foreign(marker)))
    with pytest.raises(TokenFileError):
        read_index(str(tmp_path / "text"))
    assert not marker.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_of_hugging_face_that_are_a_pickle(tmp_path: Path, marker: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Foreign(marker)))
    with pytest.raises(BadInputError):
        read_folder(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "cl100k_base.tiktoken", "tokenizer.pkl"])
def test_a_tokenizer_that_is_a_pickle(tmp_path: Path, marker: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps(Foreign(marker)))
    with pytest.raises(TokenizerError):
        Tokenizer.load(tmp_path / name)
    assert not marker.exists()


# YAML -----------------------------------------------------------------------------------------------------------------

TAGS = [
    "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{marker}]]",
    "!!python/object/apply:os.system ['touch {marker}']",
    "!!python/object/new:os.system ['touch {marker}']",
    "!!python/name:os.system",
    "!!python/module:os",
]


def test_the_tags_of_these_tests_work(marker: Path) -> None:
    yaml.unsafe_load(TAGS[1].format(marker=marker))
    assert marker.exists()


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("form", ["{tag}", "run: {tag}", "run:\n  name: {tag}", "base: {tag}", "{tag}: 1"])
def test_a_config_with_a_tag_is_refused(tmp_path: Path, marker: Path, form: str, tag: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(form.format(tag=tag.format(marker=marker)), encoding="utf-8")
    with pytest.raises(ConfigError):
        load_config(path)
    assert not marker.exists()


@pytest.mark.parametrize("tag", TAGS)
def test_an_override_with_a_tag_is_refused(tmp_path: Path, marker: Path, tag: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("run:\n  name: small\n", encoding="utf-8")
    with pytest.raises(ConfigError):
        load_config(path, [f"run.root={tag.format(marker=marker)}"])
    assert not marker.exists()


@pytest.mark.parametrize("tag", TAGS)
def test_the_config_in_a_checkpoint_with_a_tag_is_refused(tmp_path: Path, marker: Path, tag: str) -> None:
    write_manifest(tmp_path, Manifest(1, f"run:\n  name: {tag.format(marker=marker)}\n", {}, {}, {}))
    assert tag.partition(" ")[0] in read_manifest(tmp_path).config
    with pytest.raises(BadInputError, match="cannot be read"):
        read_config(tmp_path)
    assert not marker.exists()
