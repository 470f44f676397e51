"""Models trained here go out: from tensor- and pipeline-parallel ranks and FP8 weights, to what transformers trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.prepare.train_tokenizer import train_bpe
from tests.hf.our_models import convert, logits_of, train_and_save
from tests.hf.their_models import logits_of_folder, weights_of
from tests.ranks import run_on_ranks
from tests.small_run import small_config

VOCAB_SIZE, SEQ_LENGTH = 300, 16
SHAPE = {"num_layers": 2, "seq_length": SEQ_LENGTH, "vocab_size": VOCAB_SIZE}
TRAINING = {"global_batch_size": 4, "train_iters": 2}
# FP8 primary weights on two stages of two ranks each; the vocabulary is padded to 512 there.
LLAMA = {
    "model": SHAPE,
    "parallel": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    "precision": {"mode": "fp8", "fp8_param_gather": True, "fp8_amax_history_len": 4},
}
GPT2 = {
    "model": {
        **SHAPE,
        "num_query_groups": 8,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "activation": "gelu",
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": False,
        "fuse_qkv_params": False,
        "hidden_dropout": 0.1,
    },
    "parallel": {"pipeline_model_parallel_size": 2},
    "precision": {"mode": "bf16"},
}
MODELS = {"llama": (4, LLAMA), "gpt2": (2, GPT2)}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Checkpoints of every model (`NAME-run/checkpoints`), and as they go out in FP32 (`NAME`)."""
    root = tmp_path_factory.mktemp("exported")
    train_bpe(["for batch in data: loss = model(batch)"], VOCAB_SIZE, root / "tokenizer.json")
    for name, (world_size, sections) in MODELS.items():
        data = {"tokenizer_model": str(root / "tokenizer.json")}
        config = small_config(**sections, training=TRAINING, data=data, optimizer={"lr": 1e-2})
        run_on_ranks(world_size, train_and_save, config, root / f"{name}-run" / "checkpoints")
        convert("export", root / f"{name}-run", root / name, "--dtype", "fp32", "--max-shard-size", "100KB")
    return root


def test_logits_are_those_of_transformers(root) -> None:
    tokens = torch.randint(0, VOCAB_SIZE, (2, SEQ_LENGTH), generator=torch.Generator().manual_seed(1))
    directories = [root / f"{name}-run" / "checkpoints" for name in MODELS]
    (ours,) = run_on_ranks(1, logits_of, directories, [tokens] * len(directories))
    for name, logits in zip(MODELS, ours, strict=True):
        theirs = logits_of_folder(root / name, tokens)
        torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_through_hugging_face_changes_no_bit(root, tmp_path, name) -> None:
    convert("import", root / name, tmp_path / "in")
    convert("export", tmp_path / "in", tmp_path / "out")
    before, after = weights_of(root / name), weights_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (root / name / file).read_bytes() == (tmp_path / "out" / file).read_bytes()


@pytest.mark.parametrize(("option", "dtype"), [((), torch.bfloat16), (("--dtype", "fp16"), torch.float16)])
def test_weights_in_16_bits_are_the_masters_rounded(root, tmp_path, option, dtype) -> None:
    convert("export", root / "llama-run" / "checkpoints", tmp_path / "out", *option)
    whole, rounded = weights_of(root / "llama"), weights_of(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    for key, tensor in whole.items():
        assert rounded[key].dtype == dtype
        assert torch.equal(rounded[key], tensor.to(dtype))


def test_files_are_as_large_as_asked(root) -> None:
    files = list((root / "llama").glob("*.safetensors"))
    assert len(files) > 2
    assert all(path.stat().st_size < 105_000 for path in files)


def test_tokenizer_is_the_runs(root) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(root / "llama"), Tokenizer.load(root / "tokenizer.json")
    text = "for batch in data:\n    loss = model(batch)"
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eod_id
    assert json.loads((root / "llama" / "config.json").read_text())["eos_token_id"] == ours.eod_id


@pytest.mark.slow
def test_folders_train_under_transformers_and_accelerate(root) -> None:
    program = Path(__file__).with_name("train_folders.py")
    done = subprocess.run(
        [sys.executable, program, *(root / name for name in MODELS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 2 * len(MODELS)
    for which, result in results.items():
        num_parameters = len(weights_of(Path(which.split()[1])))
        assert result["steps"] == len(result["losses"]) == 2, which
        assert all(2 < loss < 8 for loss in result["losses"]), which
        # Every one of them takes part.
        assert result["changed"] == num_parameters, which
