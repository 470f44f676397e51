"""Planned memory against the tensors of real runs on CPU ranks, over layouts and number formats."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from megatron_fp8.config.attention import FusedAttention
from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.gpus import GPUS
from megatron_fp8.planner.memory import MemoryKind, StageMemory, activation_sizes, stage_memories
from tests.model.test_model_forms import FORMS
from tests.planner.held import held_by_rank, peak_of_step
from tests.ranks import run_on_ranks
from tests.small_run import VOCAB_SIZE, run_small, small_config

LLAMA = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 256,
    "seq_length": 128,
}
GPT = {
    **LLAMA,
    "num_query_groups": None,
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
    "position_embedding_type": "learned_absolute",
    "untie_embeddings_and_output_weights": False,
    "hidden_dropout": 0.1,
}
FP8 = {"mode": "fp8", "fp8_amax_history_len": 16}
BLOCKS = {**FP8, "fp8_recipe": "blockwise"}
PRIMARY = {**FP8, "fp8_param_gather": True}
LOW = {**FP8, "main_params_dtype": "fp16", "main_grads_dtype": "bf16", "exp_avg_dtype": "fp16"}
LOW |= {"exp_avg_sq_dtype": "bf16"}
RECOMPUTE = {"recompute_granularity": "full"}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "fp32": (1, LLAMA, {"mode": "fp32"}, {}),
    "bf16, replicated": (2, LLAMA, {"mode": "bf16"}, {"use_distributed_optimizer": False}),
    "bf16, GPT, distributed": (2, GPT, {"mode": "bf16"}, {}),
    "fp8, long history": (1, LLAMA, {**FP8, "fp8_amax_history_len": 1024}, {}),
    "fp8, GPT, stages": (2, GPT, FP8, PP2),
    "fp8 weights, distributed": (2, LLAMA, PRIMARY, {}),
    "fp8 weights in blocks": (2, LLAMA, PRIMARY | BLOCKS, {}),
    "fp8, recomputed": (1, LLAMA | RECOMPUTE, FP8, {}),
    "blockwise, two layers recomputed": (1, LLAMA | RECOMPUTE | {"recompute_num_layers": 2}, BLOCKS, {}),
    "mxfp8, sequence parallel": (2, LLAMA, {**FP8, "fp8_recipe": "mxfp8"}, {**TP2, "sequence_parallel": True}),
    "low formats, first and last in bf16": (2, LLAMA, {**LOW, "first_last_layers_bf16": True}, {}),
    "bf16, interleaved": (2, LLAMA, {"mode": "bf16"}, {**PP2, "virtual_pipeline_model_parallel_size": 2}),
    "fp8, TP and PP, tied": (4, GPT, FP8, {**TP2, **PP2, "sequence_parallel": True}),
}


# Variants of the others, left to the long run.
SLOW = (
    "fp32",
    "fp8, long history",
    "blockwise, two layers recomputed",
    "mxfp8, sequence parallel",
    "low formats, first and last in bf16",
)


def config_of(
    model: dict[str, Any], precision: dict[str, Any], parallel: dict[str, Any], micro_batch_size: int = 2
) -> Config:
    return small_config(
        model=model,
        precision=precision,
        parallel=parallel,
        training={"micro_batch_size": micro_batch_size, "global_batch_size": 8},
    )


def observe(config: Config) -> dict[str, Any]:
    record = run_small(config, 1, held_by_rank)
    return {**record.probe, "stage": record.coordinates["pp"]}


def for_backward(planned: StageMemory) -> float:
    return planned.by_kind[MemoryKind.ACTIVATIONS] + planned.by_kind[MemoryKind.LOGITS]


def at_most(planned: StageMemory) -> float:
    # Messages and working memory are gone when a forward pass ends.
    return planned.total - planned.by_kind[MemoryKind.COMMUNICATION] - planned.by_kind[MemoryKind.WORKING]


def kept(planned: StageMemory, config: Config) -> float:
    size = at_most(planned) - for_backward(planned)
    # TE makes the columns of FP8 weights in blocks anew in each step.
    gone = config.precision.fp8_param_gather and config.precision.fp8_recipe == "blockwise"
    return size - planned.by_kind[MemoryKind.FP8_TRANSPOSES] if gone else size


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES])
def test_a_run_holds_what_was_planned(case: str) -> None:
    world_size, *sections = CASES[case]
    config = config_of(*sections)
    gpu = GPUS["cpu"]
    planned = stage_memories(config, derive_layout(config, world_size, VOCAB_SIZE), gpu)
    # The 32 MiB that TE sets aside for cuBLAS would hide everything else of such a model.
    workspace = gpu.gemm_workspace_bytes
    for observed in run_on_ranks(world_size, observe, config):
        stage = planned[observed["stage"]]
        assert observed["kept"] - workspace == pytest.approx(kept(stage, config) - workspace, rel=0.05)
        assert observed["for backward"] == pytest.approx(for_backward(stage), rel=0.05)
        assert observed["at most"] - workspace == pytest.approx(at_most(stage) - workspace, rel=0.05)


def observe_all(configs: list[Config]) -> list[dict[str, Any]]:
    return [observe(config) for config in configs]


@pytest.mark.parametrize("precision", [{"mode": "bf16"}, FP8], ids=["bf16", "fp8"])
def test_what_every_form_of_model_keeps_was_planned(precision: dict[str, Any]) -> None:
    longrope = ("rope_scaling_type", "rope_short_factor", "rope_long_factor", "kv_channels")
    configs = [
        config_of(LLAMA | {key: value for key, value in form.items() if key not in longrope}, precision, {})
        for form in FORMS.values()
    ]
    (found,) = run_on_ranks(1, observe_all, configs)
    for name, config, observed in zip(FORMS, configs, found, strict=True):
        (planned,) = stage_memories(config, derive_layout(config, 1, VOCAB_SIZE), GPUS["cpu"])
        assert observed["for backward"] == pytest.approx(for_backward(planned), rel=0.02), name
        assert observed["kept"] == pytest.approx(kept(planned, config), rel=0.02), name


UNFUSED: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "grouped queries": ("fp32", False, {"seq_length": 256}),
    "dropout": ("fp32", False, {**GPT, "seq_length": 256, "attention_dropout": 0.1}),
    "two layers recomputed": (
        "fp32",
        False,
        {"seq_length": 256, "recompute_granularity": "full", "recompute_num_layers": 2},
    ),
    "documents apart": ("fp32", True, {"seq_length": 256}),
    "documents apart, dropout": ("fp32", True, {**GPT, "seq_length": 256, "attention_dropout": 0.1}),
    "bf16": ("bf16", False, {"seq_length": 256}),
    "bf16, documents apart": ("bf16", True, {"seq_length": 256}),
    "bf16, sinks": ("bf16", False, {"seq_length": 256, "softmax_type": "learnable"}),
    "fp32, documents apart, window": ("fp32", True, {"seq_length": 256, "window_size": [63, 0]}),
    # Whose softmax is torch's.
    "bf16, documents apart, odd": ("bf16", True, {"seq_length": 252}),
    "bf16, documents apart, dropout": ("bf16", True, {**GPT, "seq_length": 256, "attention_dropout": 0.1}),
}


def observe_unfused(config: Config) -> dict[str, Any]:
    # The stand-in then leaves attention to TE's own unfused one, as a GPU does.
    os.environ["NVTE_FUSED_ATTN"] = "0"
    return observe(config)


@pytest.mark.parametrize("case", UNFUSED)
def test_the_scores_of_unfused_attention_on_gpus_were_planned(case: str) -> None:
    mode, apart, model = UNFUSED[case]
    config = config_of({**LLAMA, **model}, {"mode": mode}, {})
    # Of a GPU on which determinism leaves nothing fused.
    training = config.training.model_copy(update={"deterministic_mode": True})
    data = config.data.model_copy(update={"reset_attention_mask": apart})
    config = config.model_copy(update={"training": training, "data": data})
    layout = derive_layout(config, 1, VOCAB_SIZE)
    gpu = replace(GPUS["cpu"], attention=FusedAttention(deterministic=False))
    (planned,) = stage_memories(config, layout, gpu)
    usual = config.model_copy(update={"training": training.model_copy(update={"deterministic_mode": False})})
    (fused,) = stage_memories(usual, layout, GPUS["cpu"])
    (observed,) = run_on_ranks(1, observe_unfused, config)
    assert observed["for backward"] == pytest.approx(for_backward(planned), rel=0.05)
    assert for_backward(planned) > 1.4 * for_backward(fused)


def test_a_gpu_has_no_fused_attention_for_fp32_alone() -> None:
    for name, gpu in GPUS.items():
        for mode in ("fp32", "bf16", "fp8"):
            config = config_of(LLAMA, {"mode": mode}, {})
            sizes = activation_sizes(config, derive_layout(config, 1, VOCAB_SIZE), gpu)
            # Two samples, four heads.
            assert sizes.scores == (2 * 4 * 128 * 128 * 4 if mode == "fp32" and name != "cpu" else 0)


WIDER = {"hidden_size": 192, "num_attention_heads": 8, "ffn_hidden_size": 512}
WIDE, WIDE_GPT = LLAMA | WIDER | {"num_query_groups": 4}, GPT | WIDER
APART = {"fuse_qkv_params": False}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
MOMENTS = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}
WHOLE: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "QKV apart, bf16": (2, WIDE | APART, {"mode": "bf16"}, {}),
    "QKV apart, bf16, replicated": (2, WIDE | APART, {"mode": "bf16"}, {"use_distributed_optimizer": False}),
    "QKV apart, fp8, TP": (2, WIDE | APART, FP8, TP2),
    "QKV apart, fp8, recomputed": (1, WIDE | APART | RECOMPUTE, FP8, {}),
    "QKV apart, bf16, interleaved": (2, WIDE | APART, {"mode": "bf16"}, VPP2),
    "QKV apart, GPT tied, fp8, stages": (2, WIDE_GPT | APART, FP8, PP2),
    "fp16": (2, WIDE, {"mode": "fp16", "initial_loss_scale": 1024.0}, {}),
    "fp8 moments": (2, WIDE, FP8 | MOMENTS, {}),
    "fp8 moments and weights": (2, WIDE, PRIMARY | MOMENTS | {"fp8_recipe": "tensorwise"}, {}),
    "fp8 weights, TP and PP": (4, WIDE, PRIMARY | {"fp8_recipe": "tensorwise"}, TP2 | PP2),
    "TP and PP interleaved, bf16": (4, WIDE, {"mode": "bf16"}, TP2 | VPP2),
    "TP and PP interleaved, sequence parallel, fp8": (4, WIDE, FP8, SP2 | VPP2),
    "PP interleaved and DP, fp8": (4, WIDE, FP8, VPP2),
    "PP interleaved, fp8, recomputed": (2, WIDE | RECOMPUTE, FP8, VPP2),
    "PP interleaved, GPT, dropout": (2, WIDE_GPT, {"mode": "bf16"}, VPP2),
    "PP interleaved, fp32": (2, WIDE, {"mode": "fp32"}, VPP2),
    "PP interleaved, low formats": (2, WIDE, LOW, VPP2),
    "PP recomputed, bf16": (2, WIDE | RECOMPUTE, {"mode": "bf16"}, PP2),
    "TP recomputed, sequence parallel, fp8": (2, WIDE | RECOMPUTE, FP8, SP2),
    "TP 4, sequence parallel, bf16": (4, WIDE, {"mode": "bf16"}, SP2 | {"tensor_model_parallel_size": 4}),
    "PP 4, fp8": (4, WIDE, FP8, {"pipeline_model_parallel_size": 4}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WHOLE)
def test_the_whole_of_what_a_run_holds_was_planned(case: str) -> None:
    """Activations that stages have sent or received are here, whichever kind they are counted under."""
    world_size, *sections = WHOLE[case]
    config = config_of(*sections)
    gpu = GPUS["cpu"]
    planned = stage_memories(config, derive_layout(config, world_size, VOCAB_SIZE), gpu)
    for observed in run_on_ranks(world_size, observe, config):
        stage = planned[observed["stage"]]
        size = stage.total - stage.by_kind[MemoryKind.WORKING] - gpu.gemm_workspace_bytes
        assert observed["at most"] - gpu.gemm_workspace_bytes == pytest.approx(size, rel=0.05)


def observe_peak(config: Config) -> int:
    return run_small(config, 1, peak_of_step).probe


LARGER = LLAMA | {"hidden_size": 256, "ffn_hidden_size": 704, "seq_length": 256}


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        pytest.param(LARGER, {"mode": "fp32"}, marks=pytest.mark.slow),
        (LARGER | RECOMPUTE, {"mode": "fp32"}),
        pytest.param(LARGER | {"vocab_size": 8192}, {"mode": "fp32"}, marks=pytest.mark.slow),
        (LARGER, FP8),
    ],
)
def test_the_estimate_of_working_memory_makes_up_the_peak(model: dict[str, Any], precision: dict[str, Any]) -> None:
    """Backward passes, optimizer and all; in formats in which the stand-in casts few operands to FP32 on the way."""
    config = config_of(model, precision, {}, micro_batch_size=4)
    gpu = GPUS["cpu"]
    (planned,) = stage_memories(config, derive_layout(config, 1, VOCAB_SIZE), gpu)
    (observed,) = run_on_ranks(1, observe_peak, config)
    workspace = gpu.gemm_workspace_bytes
    assert observed - workspace == pytest.approx(planned.total - workspace, rel=0.05)
