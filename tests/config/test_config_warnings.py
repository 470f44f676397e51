"""What is allowed and still worth a word."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_samples import load_small, write

from megatron_fp8.config.config_warnings import config_warnings, fp8_seconds
from megatron_fp8.config.layout import GemmShape, derive_layout
from megatron_fp8.config.load import dump_config, load_config


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([], []),
        (["precision.fp8_margin=1", "precision.amax_reduction=off"], ["fp8_margin", "amax_reduction"]),
        (["precision.fp8_margin=0"], []),
        (["precision.mode=fp8", "precision.fp8_margin=1"], []),
        (["optimizer.lr_wsd_decay_iters=5"], ["lr_wsd_decay_iters"]),
        (["optimizer.lr_decay_style=constant", "optimizer.min_lr=1e-4"], ["min_lr"]),
        (["optimizer.lr_warmup_init=1e-4"], ["lr_warmup_init"]),
        # What an exported model says of itself, and an imported one brings.
        (["model.max_position_embeddings=99"], []),
        (["model.position_embedding_type=learned_absolute", "model.rotary_base=5"], ["rotary_base"]),
        (["model.recompute_num_layers=1"], ["recompute_num_layers"]),
        (["training.eval_iters=0"], ["valid_data_path"]),
    ],
)
def test_keys_that_do_nothing_are_pointed_out(tmp_path: Path, overrides: list[str], keys: list[str]) -> None:
    warnings = config_warnings(load_small(tmp_path, overrides), None)
    assert [warning.key.partition(".")[2] for warning in warnings] == keys
    assert all("no effect" in warning.reason for warning in warnings)


def test_a_written_config_read_back_brings_no_warnings(tmp_path: Path) -> None:
    text = dump_config(load_small(tmp_path).config)
    assert config_warnings(load_config(write(tmp_path, text, "resolved.yaml")), None) == []


@pytest.mark.parametrize(("width", "pays"), [(128, False), (512, False), (4096, True), (8192, True)])
def test_fp8_pays_for_large_gemms_only(width: int, pays: bool) -> None:
    saved, spent = fp8_seconds((GemmShape("fc1", 4096, width, 4 * width),), 8)
    assert (saved > spent) == pays


def test_a_model_too_small_for_fp8_and_idle_stages_are_pointed_out(tmp_path: Path) -> None:
    overrides = ["precision.mode=fp8", "parallel.pipeline_model_parallel_size=4", "training.global_batch_size=4"]
    loaded = load_small(tmp_path, overrides)
    warnings = config_warnings(loaded, derive_layout(loaded.config, 4, 1000))
    assert [warning.key for warning in warnings] == ["precision.mode", "training.global_batch_size"]
    assert "slower than BF16" in warnings[0].reason
    assert "2 micro-batches" in warnings[1].reason


@pytest.mark.parametrize(
    ("mode", "seq_length", "said"), [("fp32", 4096, True), ("fp32", 64, False), ("bf16", 4096, False)]
)
def test_scores_that_fp32_keeps_on_gpus_are_pointed_out(tmp_path: Path, mode: str, seq_length: int, said: bool) -> None:
    loaded = load_small(tmp_path, [f"precision.mode={mode}", f"model.seq_length={seq_length}"])
    warnings = config_warnings(loaded, derive_layout(loaded.config, 1, 1000))
    assert [warning.key for warning in warnings] == (["precision.mode"] if said else [])
    said_of_size = "keeps 1.0 GiB of scores a layer (2 x 8 heads x 4096 x 4096 x 4 bytes)"
    assert all(said_of_size in warning.reason for warning in warnings)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.attn_logit_softcapping=50"], "model.attn_logit_softcapping"),
        (["model.window_size=[99,0]"], None),
        (["model.window_size=[99,0]", "model.attention_dropout=0.1"], "model.attention_dropout"),
        (["model.kv_channels=100"], "model.kv_channels"),
        (["model.kv_channels=264"], "model.kv_channels"),
        (["model.kv_channels=256"], None),
        (["model.softmax_type=learnable"], None),
        (["model.softmax_type=learnable", "data.reset_attention_mask=true"], "model.softmax_type"),
        (["model.softmax_type=off-by-one", "training.deterministic_mode=true"], "model.softmax_type"),
        (["model.softmax_scale=0.5"], None),
    ],
)
def test_forms_that_gpus_do_not_fuse_are_pointed_out(tmp_path: Path, overrides: list[str], key: str | None) -> None:
    """As `docs/gpu.md` lists them."""
    loaded = load_small(tmp_path, ["precision.mode=bf16", "model.seq_length=8192", *overrides])
    warnings = config_warnings(loaded, derive_layout(loaded.config, 1, 1000))
    assert [warning.key for warning in warnings] == ([key] if key else [])
    assert all("GiB of scores a layer" in warning.reason and warning.use_instead for warning in warnings)


APART = ["training.deterministic_mode=true", "data.reset_attention_mask=true", "precision.mode=bf16"]


@pytest.mark.parametrize(
    ("overrides", "seq_length", "said"),
    [
        # 2 samples x 8 heads x 8192 x 8192 are 2^30; of 2 bytes, twice, and 2 x 8192 x 8192 bytes of mask.
        (APART, 8192, "a micro-batch keeps at least 4.1 GiB"),
        # Half as many pairs with 2^2 samples, as four documents have: the fifth makes it eight.
        (APART, 2048, "a micro-batch with more than 16 documents keeps at least 4.1 GiB"),
        ([*APART, "training.micro_batch_size=4"], 4096, "a micro-batch with more than 4 documents keeps at least 4.1"),
        ([*APART, "training.micro_batch_size=8"], 4096, "a micro-batch keeps at least 4.1 GiB"),
        # Sixteen tokens do not make so many documents.
        (APART, 64, None),
        (APART[1:], 8192, None),
        ([APART[0], APART[2]], 8192, None),
    ],
)
def test_documents_apart_that_determinism_leaves_unfused_are_pointed_out(
    tmp_path: Path, overrides: list[str], seq_length: int, said: str | None
) -> None:
    loaded = load_small(tmp_path, [*overrides, f"model.seq_length={seq_length}"])
    warnings = config_warnings(loaded, derive_layout(loaded.config, 1, 1000))
    assert [warning.key for warning in warnings] == ([] if said is None else ["training.deterministic_mode"])
    assert all(str(said) in warning.reason for warning in warnings)
