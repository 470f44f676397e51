"""The precision chart against the formats and sizes of real tensors, in every mode."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.schema import Config
from megatron_fp8.precision.chart import GEMM_OPERANDS, precision_chart
from megatron_fp8.precision.chart_labels import LABELS, chart_records, format_chart, row_format, row_label
from megatron_fp8.precision.chart_rows import ChartRow, Collective, Format, Group, Per, Section, Tensor
from tests.precision.observed import observed_activations, observed_collectives, observed_gemms
from tests.ranks import run_on_ranks
from tests.small_run import VOCAB_SIZE, batches, run_small, small_config

FP8 = {"mode": "fp8"}
MODES: dict[str, dict[str, Any]] = {
    "fp32": {"mode": "fp32"},
    "fp16": {"mode": "fp16", "initial_loss_scale": 256.0},
    "bf16": {"mode": "bf16"},
    "delayed": {**FP8, "fp8_amax_history_len": 4},
    "delayed e4m3": {**FP8, "fp8_format": "e4m3"},
    "tensorwise": {**FP8, "fp8_recipe": "tensorwise"},
    "blockwise": {**FP8, "fp8_recipe": "blockwise"},
    "mxfp8": {**FP8, "fp8_recipe": "mxfp8"},
    "first and last in bf16": {**FP8, "first_last_layers_bf16": True},
    "wgrad in bf16": {**FP8, "fp8_recipe": "tensorwise", "override_linear_precision": [False, False, True]},
    "primary weights": {**FP8, "fp8_param_gather": True},
    "primary weights, blockwise": {**FP8, "fp8_param_gather": True, "fp8_recipe": "blockwise"},
    "low moments": {"mode": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"},
    "low masters": {**FP8, "main_params_dtype": "fp16", "main_grads_dtype": "bf16", "exp_avg_dtype": "fp16"},
}
# Sizes of which no block is cut short: 128 tokens on each rank, 128 features and more.
NUM_LAYERS = 3
MODEL = {
    "num_layers": NUM_LAYERS,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 256,
}
MODEL |= {"seq_length": 128}
NUM_TOKENS, NUM_MICROBATCHES = 4 * 128, 2


def config_of(mode: str, **parallel: Any) -> Config:
    return small_config(
        model=MODEL,
        precision=MODES[mode],
        parallel=parallel,
        training={"micro_batch_size": 2, "global_batch_size": 4},
    )


def chart_of(config: Config, world_size: int = 1) -> list[ChartRow]:
    return precision_chart(config, derive_layout(config, world_size, VOCAB_SIZE))


def find(rows: list[ChartRow], tensor: Tensor, **fields: Any) -> ChartRow:
    (row,) = (row for row in rows if row.tensor is tensor and all(getattr(row, n) is v for n, v in fields.items()))
    return row


def probe_rank(parts: Any) -> dict[str, Any]:
    """Formats and sizes of everything on a rank."""

    def step() -> None:
        parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)

    groups = parts.groups
    named = {"tp": groups.tp, "pp": groups.pp, "dp": groups.dp}
    step()
    return {
        "gemms": observed_gemms(step),
        "collectives": observed_collectives(step, named),
        "activations": kept_by_a_layer(parts),
        "state": optimizer_state(parts),
        "gradients": {str(p.main_grad.dtype) for p in parts.chunks[0].parameters()},
        "norms": sum(p.numel() for n, p in parts.chunks[0].named_parameters() if "norm_weight" in n or p.ndim == 1),
        "parameters": sum(p.numel() for p in parts.chunks[0].parameters()),
    }


def kept_by_a_layer(parts: Any) -> Counter:
    """Bytes by format that a layer in FP8 (if any is) keeps of one micro-batch for its backward pass."""
    import torch

    stage = parts.chunks[0].module
    precision = stage._precision
    number = next((number for number in range(NUM_LAYERS) if precision.runs_in_fp8(number)), 0)
    layer = stage.layers[number]
    rope = stage._angles(128)[number]
    tp = parts.groups.tp.size() if parts.config.parallel.sequence_parallel else 1
    hidden = torch.randn(128 // tp, 2, 128, device="cuda").to(precision.params_dtype).requires_grad_()

    def call() -> Any:
        with precision.region(number):
            return layer(hidden, is_first_microbatch=True, rotary_pos_emb=rope)

    known = {rope.untyped_storage().data_ptr()} | weight_storages(layer)
    by_format: Counter = Counter()
    for name, size in observed_activations(call, known).values():
        by_format[name] += size
    return by_format


def weight_storages(layer: Any) -> set[int]:
    """Addresses of a layer's weights, in whatever form."""
    found = set()
    for parameter in layer.parameters():
        tensors = [parameter] if parameter.untyped_storage().nbytes() else []
        tensors += [value for value in vars(parameter).values() if hasattr(value, "untyped_storage")]
        found |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return found


def optimizer_state(parts: Any) -> dict[str, tuple[str, int]]:
    """(dtype, elements) of each kind of tensor that this rank's optimizer holds."""
    optimizer = getattr(parts.optimizer, "chained_optimizers", [parts.optimizer])[0]
    found: dict[str, tuple[str, int]] = {}
    for state in optimizer.optimizer.state.values():
        for name, tensor in state.items():
            dtype = "e4m3" if hasattr(tensor, "_fp8_dtype") else str(tensor.dtype).removeprefix("torch.")
            found[name] = (dtype, found.get(name, (dtype, 0))[1] + tensor.numel())
    masters = getattr(optimizer, "shard_fp32_from_float16_groups", [])
    whole = [tensor for group in masters for tensor in group if tensor is not None]
    if whole:
        (dtype,) = {str(tensor.dtype).removeprefix("torch.") for tensor in whole}
        found["master_param"] = (dtype, sum(tensor.numel() for tensor in whole))
    return found


def observe(config: Config) -> dict[str, Any]:
    return run_small(config, 0, probe_rank).probe


@pytest.fixture(scope="module")
def one_rank() -> Any:
    """What one rank has in a mode, looked at once."""
    known: dict[str, dict[str, Any]] = {}

    def look(mode: str) -> dict[str, Any]:
        if mode not in known:
            (known[mode],) = run_on_ranks(1, observe, config_of(mode))
        return known[mode]

    return look


@pytest.mark.parametrize("mode", MODES)
def test_gemm_operands(mode: str, one_rank: Any) -> None:
    config = config_of(mode)
    rows = chart_of(config)
    layers_in_fp8 = 1 if mode == "first and last in bf16" else NUM_LAYERS
    outside = find(rows, Tensor.HEAD_OPERANDS).format.value
    count_outside = (1 + 4 * (NUM_LAYERS - layers_in_fp8)) * NUM_MICROBATCHES
    expected: Counter = Counter()
    for gemm, operands in GEMM_OPERANDS.items():
        for operand in operands:
            row = find(rows, Tensor.GEMM_OPERAND, gemm=gemm, operand=operand)
            expected[gemm.name.lower(), operand.name.lower(), row.format.value] += 4 * layers_in_fp8 * NUM_MICROBATCHES
            expected[gemm.name.lower(), operand.name.lower(), outside] += count_outside
    assert one_rank(mode)["gemms"] == expected


@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_of_each_parameter(mode: str, one_rank: Any) -> None:
    rows, observed = chart_of(config_of(mode)), one_rank(mode)
    torch_names = {Format.FP32: "float32", Format.BF16: "bfloat16", Format.FP16: "float16", Format.E4M3: "e4m3"}
    state = observed["state"]
    for tensor, key in ((Tensor.FIRST_MOMENT, "exp_avg"), (Tensor.SECOND_MOMENT, "exp_avg_sq")):
        assert state[key] == (torch_names[find(rows, tensor).format], observed["parameters"])
    assert observed["gradients"] == {f"torch.{torch_names[find(rows, Tensor.WEIGHT_GRADS).format]}"}
    masters = find(rows, Tensor.MASTER_WEIGHTS)
    if mode == "fp32":
        assert masters.size == 0
        assert "master_param" not in state
    else:
        assert state["master_param"] == (torch_names[masters.format], observed["parameters"])


@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_for_backward(mode: str, one_rank: Any) -> None:
    assert_kept(chart_of(config_of(mode)), one_rank(mode)["activations"], 2 * 128)


def assert_kept(rows: list[ChartRow], observed: Counter, num_tokens: int) -> None:
    kept = [row for row in rows if row.section is Section.KEPT_FOR_BACKWARD]
    expected = sum(row.size for row in kept) * num_tokens
    # Counters, random states and scales of whole tensors are a few bytes each.
    assert sum(observed.values()) == pytest.approx(expected, abs=200)
    fp8 = sum(row.size for row in kept if row.format.is_fp8) * num_tokens
    assert observed["bytes"] <= fp8
    assert observed["bytes"] >= fp8 / 1.04


COLLECTIVES = {
    Collective.ALL_REDUCE: "all-reduce",
    Collective.REDUCE_SCATTER: "reduce-scatter",
    Collective.ALL_GATHER: "all-gather",
}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("mode", "sequence_parallel"),
    [("bf16", True), ("delayed", True), ("tensorwise", True), ("blockwise", True), ("mxfp8", True), ("delayed", False)],
)
def test_tensor_parallel_messages(mode: str, sequence_parallel: bool) -> None:
    parallel = {**SP, "sequence_parallel": sequence_parallel}
    config = config_of(mode, **parallel)
    observed = run_on_ranks(2, observe, config)[0]
    rows = chart_of(config, 2)
    expected: Counter = Counter()
    for row in rows:
        if row.group is not Group.TP or row.collective is None:
            continue
        count = {Per.TOKEN: NUM_TOKENS, Per.TOKEN_AND_LAYER: NUM_LAYERS * NUM_TOKENS}.get(row.per)
        if count is not None:  # amaxes of one element are left out
            expected[COLLECTIVES[row.collective], row.format.value] += row.size * count
    found: Counter = Counter()
    for (group, collective, name), size in observed["collectives"].items():
        if group == "tp":
            found[collective, name] += size
    # Bytes and their scales: the owner of bytes knows their format.
    fp8 = sum(size for (_, name), size in expected.items() if name in ("e4m3", "e5m2"))
    gathered = found.pop(("all-gather", "bytes"), 0) + found.pop(("all-gather", "fp32"), 0)
    assert gathered == fp8
    expected = Counter({key: size for key, size in expected.items() if key[1] not in ("e4m3", "e5m2")})
    # Gradients of norms and of what else every rank holds whole.
    found["all-reduce", "fp32"] -= 4 * observed["norms"] if sequence_parallel else 0
    assert found == expected
    if mode == "delayed":
        others = sum(size for (group, _, _), size in observed["collectives"].items() if group == "other")
        assert others == NUM_LAYERS * find(rows, Tensor.AMAXES).size
    assert_kept(rows, observed["activations"], 2 * 128)


@pytest.mark.parametrize(
    ("mode", "distributed"),
    [("fp32", True), ("delayed", True), ("primary weights", True), ("low masters", True), ("delayed", False)],
)
def test_data_parallel_messages(mode: str, distributed: bool) -> None:
    config = config_of(mode, use_distributed_optimizer=distributed)
    rows = chart_of(config, 2)
    observed = run_on_ranks(2, observe, config)[0]
    found = observed["collectives"]
    grads = Collective.REDUCE_SCATTER if distributed else Collective.ALL_REDUCE
    row = find(rows, Tensor.GRADS, group=Group.DP, collective=grads)
    observed_grads = found["dp", COLLECTIVES[grads], row.format.value]
    assert observed_grads == pytest.approx(row.size * observed["parameters"], rel=0.02)
    if distributed and mode != "primary weights":
        row = find(rows, Tensor.ALL_PARAMETERS, group=Group.DP, collective=Collective.ALL_GATHER)
        size = found["dp", "all-gather", row.format.value]
        assert size == pytest.approx(row.size * observed["parameters"], rel=0.02)
    elif distributed:
        linear = NUM_LAYERS * sum(
            gemm.in_features * gemm.out_features for gemm in derive_layout(config, 2, VOCAB_SIZE).gemms
        )
        assert found["dp", "all-gather", "bytes"] == pytest.approx(
            find(rows, Tensor.FP8_PARAMETERS).size * linear, rel=0.02
        )
        assert found["dp", "all-gather", "bf16"] == pytest.approx(2 * (observed["parameters"] - linear), rel=0.02)
    if mode == "delayed":
        amaxes = NUM_LAYERS * find(rows, Tensor.AMAXES).size
        buffers = 0 if distributed else 4 * observed["parameters"]
        assert found["dp", "all-reduce", "fp32"] == amaxes + buffers
    state = observed["state"]["exp_avg"]
    assert state[1] == pytest.approx(observed["parameters"] / (2 if distributed else 1), rel=0.02)


@pytest.mark.parametrize("mode", ["fp32", "mxfp8"])
def test_pipeline_messages(mode: str) -> None:
    config = config_of(mode, pipeline_model_parallel_size=2)
    config = config.model_copy(update={"model": config.model.model_copy(update={"num_layers": 2})})
    row = find(chart_of(config, 2), Tensor.RESIDUAL_STREAM, group=Group.PP, collective=Collective.SEND)
    for observed in run_on_ranks(2, observe, config):
        sent = {key: size for key, size in observed["collectives"].items() if key[1] == "send"}
        assert sent == {("pp", "send", row.format.value): row.size * NUM_TOKENS}


def test_no_layer_recomputed_is_no_recomputation() -> None:
    config = config_of("bf16")
    none = config.model_copy(
        update={"model": config.model.model_copy(update={"recompute_granularity": "full", "recompute_num_layers": 0})}
    )
    assert chart_of(none) == chart_of(config)


def test_the_text_has_every_row() -> None:
    rows = chart_of(config_of("delayed", **SP), 2)
    text = format_chart(rows)
    assert all(row_label(row) in text and row_format(row) in text for row in rows)
    assert len(text.splitlines()) == len(rows) + len({row.section for row in rows})


def test_records_are_json_with_typed_fields_and_labels() -> None:
    rows = chart_of(config_of("delayed", **SP), 2)
    records = json.loads(json.dumps(chart_records(rows)))
    assert len(records) == len(rows)
    assert records[0] == {
        "section": "gemm_operands",
        "tensor": "gemm_operand",
        "format": "e4m3",
        "size": 1.0,
        "per": "element",
        "scales": "fp32_per_tensor",
        "gemm": "fprop",
        "operand": "input",
        "num_shards": 1,
        "section_label": "GEMM operands",
        "label": "fprop input",
        "format_label": "e4m3, fp32 scale per tensor",
        "per_label": "element",
    }
    gathered = [r for r in records if r["section"] == "communication" and r.get("collective") == "all_gather"]
    assert {record["group"] for record in gathered} == {"tp"}
    assert all(record["label"] == row_label(row) for record, row in zip(records, rows, strict=True))


def test_no_two_members_share_a_label_within_their_kind() -> None:
    assert len({(type(member), label) for member, label in LABELS.items()}) == len(LABELS)


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "tools.precision_chart", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)


def test_the_tool_prints_the_chart_without_torch() -> None:
    ended = run_tool("configs/llama_1b_fp8.yaml", "--world-size", "8", "model.vocab_size=32000")
    assert ended.returncode == 0
    assert "64 of 64 linear layers in fp8" in ended.stdout
    assert "DP all-gather of parameters" in ended.stdout
    assert "| torch" not in ended.stderr


def test_the_tool_names_mistakes() -> None:
    ended = run_tool("configs/llama_1b_fp8.yaml", "precision.mod=fp8")
    assert ended.returncode == 2
    assert "precision.mode" in ended.stderr


def formats_in_evaluation(config: Config) -> set[str]:
    """Formats that GEMMs read in an evaluation after a training step."""

    def probe(parts: Any) -> set[str]:
        gemms = observed_gemms(lambda: parts.stepper.evaluate(batches(parts), parts.batches.shape))
        return {name for _, _, name in gemms}

    return run_small(config, 1, probe).probe


@pytest.mark.parametrize(("in_fp8", "names"), [(True, {"e4m3", "bf16"}), (False, {"bf16"})])
def test_evaluation_runs_in_fp8_or_not(in_fp8: bool, names: set[str]) -> None:
    config = config_of("delayed")
    config = config.model_copy(update={"precision": config.precision.model_copy(update={"fp8_eval": in_fp8})})
    assert run_on_ranks(1, formats_in_evaluation, config) == [names]
