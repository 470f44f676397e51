"""Models of transformers come in: the same logits here, and the same bits when they go out again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_fp8.checkpoint.resume import choose_start
from megatron_fp8.config.load import load_config
from megatron_fp8.config.resume_check import compare_with_saved
from megatron_fp8.hf import read_model
from tests.hf.our_models import convert, logits_of
from tests.hf.their_models import LLAMA, MODELS, logits_of_folder, make_folder, weights_of
from tests.ranks import run_on_ranks

TOKENS = torch.randint(0, 199, (2, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Every model as transformers saved it (`NAME`), imported (`NAME-in`) and exported again (`NAME-out`)."""
    root = tmp_path_factory.mktemp("imported")
    for name, (settings, dtype) in MODELS.items():
        make_folder(root / name, settings, dtype)
        convert("import", root / name, root / f"{name}-in", "--seq-length", 16, "--no-tokenizer")
        convert("export", root / f"{name}-in", root / f"{name}-out", "--no-tokenizer", "--max-shard-size", "60KB")
    return root


def test_logits_are_those_of_transformers(root) -> None:
    directories = [root / f"{name}-in" / "checkpoints" for name in MODELS]
    (ours,) = run_on_ranks(1, logits_of, directories, [TOKENS] * len(directories))
    for name, logits in zip(MODELS, ours, strict=True):
        theirs = logits_of_folder(root / name, TOKENS)
        assert theirs.std() > 0.05
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        again = logits_of_folder(root / f"{name}-out", TOKENS)
        torch.testing.assert_close(again, theirs, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_changes_no_bit(root, name) -> None:
    before, after = weights_of(root / name), weights_of(root / f"{name}-out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key], tensor), key
    assert len(list((root / f"{name}-out").glob("*.safetensors"))) > 1
    assert read_model(root / name / "config.json", 16) == read_model(root / f"{name}-out" / "config.json", 16)
    description = json.loads((root / f"{name}-out" / "config.json").read_text())
    assert description["architectures"] == json.loads((root / name / "config.json").read_text())["architectures"]


@pytest.mark.parametrize("name", MODELS)
def test_a_run_can_start_from_it(root, name) -> None:
    loaded = load_config(root / f"{name}-in" / "config.yaml")
    start = choose_start(loaded.config, None)
    assert start.checkpoint == root / f"{name}-in" / "checkpoints" / "iter_0000000"
    assert start.weights_only
    assert compare_with_saved(loaded.config, start.saved_config, weights_only=True) == ([], [])


def test_names_of_older_programs_will_do(root, tmp_path) -> None:
    """Those of the hub's GPT-2: without the first part, with the causal mask and a head that is the embedding."""
    weights = {name.removeprefix("transformer."): tensor for name, tensor in weights_of(root / "gpt2").items()}
    folder = tmp_path / "old"
    folder.mkdir()
    weights["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    weights["lm_head.weight"] = weights["wte.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    shutil.copy(root / "gpt2" / "config.json", folder)
    convert("import", folder, tmp_path / "in", "--no-tokenizer")
    convert("export", tmp_path / "in", tmp_path / "out", "--no-tokenizer")
    before, after = weights_of(root / "gpt2"), weights_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 300.0, "rope_parameters": None},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_parameters": {"rope_theta": 300.0}},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4, "mscale": 0.7,
                          "mscale_all_dim": 2.0, "truncate": False}, "head_dim": 16},
    ],
)  # fmt: skip
def test_rope_is_read_as_transformers_reads_it(tmp_path, changes) -> None:
    """`rope_scaling` counts where both are there, and its base is then not that of `rope_parameters`."""
    make_folder(tmp_path / "theirs", {**LLAMA, "head_dim": changes.get("head_dim", 8)}, torch.float32)
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    convert("import", path.parent, tmp_path / "in", "--seq-length", 16, "--no-tokenizer")
    ((ours,),) = run_on_ranks(1, logits_of, [tmp_path / "in" / "checkpoints"], [TOKENS])
    torch.testing.assert_close(ours, logits_of_folder(path.parent, TOKENS), atol=1e-4, rtol=0)
