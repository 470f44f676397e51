"""Names in a foreign checkpoint or run directory cannot make a job read or remove anything outside of it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_fp8.checkpoint.directory import TRACKER, CheckpointDirectory, lock_for_reading
from megatron_fp8.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    file_sum,
    find_corruption,
    read_manifest,
    write_atomically,
    write_manifest,
    write_sums,
)
from megatron_fp8.checkpoint.plain_index import INDEX, read_plain_index
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf.weights import INDEX as HF_INDEX
from megatron_fp8.hf.weights import read_folder
from megatron_fp8.report.wandb_sink import ID_FILE, run_id_of

OUTSIDE = ["../other/file", "/etc/passwd", "sub/../../file", "sub/file", "..", ".", ""]


def commit(directory: CheckpointDirectory, iteration: int) -> Path:
    path = directory.begin(iteration)
    (path / "data").write_text("content", encoding="utf-8")
    write_sums(path, 0, ["data"])
    return directory.commit(Manifest(iteration, "", {}, {}, {}))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory with a file that no attack may touch."""
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "precious").write_text("precious", encoding="utf-8")
    return directory


def is_untouched(outside: Path) -> bool:
    return [path.name for path in outside.iterdir()] == ["precious"] and (
        (outside / "precious").read_text(encoding="utf-8") == "precious"
    )


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "run" / "checkpoints")


# The index ------------------------------------------------------------------------------------------------------------


def write_index(directory: Path, file: str, of_bytes: bool) -> None:
    """An index of one tensor, or of one piece of bytes, in `file`."""
    offset = torch.Size([0])
    if of_bytes:
        described: BytesStorageMetadata | TensorStorageMetadata = BytesStorageMetadata()
        key = MetadataIndex("thing")
    else:
        chunks = [ChunkStorageMetadata(offsets=offset, sizes=torch.Size([4]))]
        described = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([4]), chunks)
        key = MetadataIndex("thing", offset)
    index = Metadata(state_dict_metadata={"thing": described}, storage_data={key: _StorageInfo(file, 0, 16)})
    (directory / INDEX).write_bytes(pickle.dumps(index))


@pytest.mark.parametrize("of_bytes", [False, True])
@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path: Path, name: str, of_bytes: bool) -> None:
    write_index(tmp_path, "__0_0.distcp", of_bytes)
    assert list(read_plain_index(tmp_path)) == ([] if of_bytes else ["thing"])
    write_index(tmp_path, name, of_bytes)
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        read_plain_index(tmp_path)


# The manifest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_that_names_a_file_elsewhere_is_damage(
    directory: CheckpointDirectory, outside: Path, name: str
) -> None:
    checkpoint = commit(directory, 1)
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, Manifest(1, "", {}, {}, {}, files={**manifest.files, name: manifest.files["data"]}))
    (found,) = find_corruption(checkpoint)
    assert "outside the checkpoint" in found


def test_a_link_to_a_file_elsewhere_is_damage_although_its_content_is_right(
    directory: CheckpointDirectory, outside: Path
) -> None:
    checkpoint = commit(directory, 1)
    (checkpoint / "data").unlink()
    (checkpoint / "data").symlink_to(outside / "precious")
    write_manifest(checkpoint, Manifest(1, "", {}, {}, {}, files={"data": file_sum(outside / "precious")}))
    (found,) = find_corruption(checkpoint)
    assert "is a symbolic link" in found


@pytest.mark.parametrize("name", [MANIFEST, INDEX, TRACKER])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(directory: CheckpointDirectory, name: str) -> None:
    commit(directory, 1)
    checkpoint = commit(directory, 2)
    place = directory.root if name == TRACKER else checkpoint
    (place / name).unlink(missing_ok=True)
    os.mkfifo(place / name)
    read = {MANIFEST: read_manifest, INDEX: read_plain_index, TRACKER: lambda _: directory.latest()}
    with pytest.raises(CheckpointError, match=f"{name}.* cannot be read.*it is a pipe, not a file"):
        read[name](checkpoint)
    with lock_for_reading(checkpoint) as is_there:
        assert is_there
    if name == MANIFEST:
        assert directory.newest_intact() == 1
        commit(directory, 3)
        assert directory.prune(keep_last=1, retain_interval=None) == [1, 2]


@pytest.mark.parametrize("iteration", ["../../outside", "1", 1.5, True, -1, None])
def test_an_iteration_that_is_no_number_of_steps_is_damage(directory: CheckpointDirectory, iteration: object) -> None:
    checkpoint = commit(directory, 1)
    write_manifest(checkpoint, Manifest(iteration, "", {}, {}, {}))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_manifest(checkpoint)


@pytest.mark.parametrize(
    "content", ["[]", "3", '{"iteration": 1}', "\x00", json.dumps({"sha256": "x", "files": {"a": []}})]
)
def test_a_manifest_of_another_form_is_damage(directory: CheckpointDirectory, content: str) -> None:
    checkpoint = commit(directory, 1)
    (checkpoint / MANIFEST).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_manifest(checkpoint)


# The tracker ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["../../outside", "/etc", "-1", "1/../..", "iter_0000001", "", "1\n2", "9" * 5000])
def test_a_tracker_that_says_a_path_is_refused(directory: CheckpointDirectory, text: str) -> None:
    commit(directory, 1)
    (directory.root / TRACKER).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="not an iteration"):
        directory.latest()


# What is removed, renamed and written ---------------------------------------------------------------------------------


def link_checkpoint(directory: CheckpointDirectory, name: str, outside: Path) -> Path:
    directory.root.mkdir(parents=True, exist_ok=True)
    path = directory.root / name
    path.symlink_to(outside, target_is_directory=True)
    return path


def prune(directory: CheckpointDirectory) -> None:
    directory.prune(keep_last=1, retain_interval=None)


def set_aside(directory: CheckpointDirectory) -> None:
    directory.set_aside(after=0)
    commit(directory, 1)
    directory.set_aside(after=0)


def sweep(directory: CheckpointDirectory) -> None:
    directory.sweep()


def begin(directory: CheckpointDirectory) -> None:
    commit(directory, 1)


@pytest.mark.parametrize(
    ("name", "act"),
    [
        ("iter_0000001", prune),
        ("iter_0000001", set_aside),
        ("iter_0000001", begin),
        ("iter_0000001.abandoned", set_aside),
        (".iter_0000001.incomplete", begin),
        (".iter_0000001.incomplete", sweep),
        (".iter_0000001.replaced", begin),
        (".iter_0000001.replaced", sweep),
        (".iter_0000001.removed", prune),
        (".iter_0000001.removed", sweep),
    ],
)
@pytest.mark.parametrize("is_dangling", [False, True])
def test_removing_a_link_leaves_what_it_points_to(
    directory: CheckpointDirectory,
    outside: Path,
    name: str,
    act: Callable[[CheckpointDirectory], None],
    is_dangling: bool,
) -> None:
    if not name.startswith("iter_0000001") or name.endswith("abandoned"):
        commit(directory, 1)
    commit(directory, 2)
    link_checkpoint(directory, name, outside / "nothing" if is_dangling else outside)
    act(directory)
    act(directory)
    assert is_untouched(outside)
    leftovers = [path for path in directory.root.iterdir() if path.name.startswith(".iter_")]
    if act is not prune and act is not set_aside:
        assert leftovers == []


def test_a_file_is_not_written_through_a_link_at_its_temporary_name(tmp_path: Path, outside: Path) -> None:
    (tmp_path / f".{TRACKER}.tmp").symlink_to(outside / "precious")
    write_atomically(tmp_path / TRACKER, "1\n")
    assert (tmp_path / TRACKER).read_text(encoding="utf-8") == "1\n"
    assert not (tmp_path / TRACKER).is_symlink()
    assert is_untouched(outside)


@pytest.mark.parametrize("text", ["x/../../../outside", "*", "", "a b", "../x", "[a-z]", "x" * 200, "a\nb"])
def test_an_id_of_wandb_that_is_a_path_or_a_pattern_is_refused(tmp_path: Path, text: str) -> None:
    """It is part of the names of the directories that are removed when a job goes on."""
    (tmp_path / ID_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=ID_FILE):
        run_id_of(tmp_path)


def test_an_id_of_wandb_s_own_is_kept(tmp_path: Path) -> None:
    made = run_id_of(tmp_path)
    assert run_id_of(tmp_path) == made
    (tmp_path / ID_FILE).write_text("my-run_2\n", encoding="utf-8")
    assert run_id_of(tmp_path) == "my-run_2"


# Hugging Face folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_an_index_of_safetensors_that_names_a_file_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / HF_INDEX).write_text(json.dumps({"weight_map": {"weight": name}}), encoding="utf-8")
    with pytest.raises(BadInputError, match="outside its folder"):
        read_folder(tmp_path)


def test_the_fixture_notices_a_loss(outside: Path) -> None:
    """Else the tests above would say nothing."""
    assert is_untouched(outside)
    shutil.rmtree(outside)
    outside.mkdir()
    assert not is_untouched(outside)
