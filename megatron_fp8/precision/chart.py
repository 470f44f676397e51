"""Lists every kind of tensor of a run with its format and its bytes: the precision chart. Imports no torch.

Computed from the config and its layout alone; `tests/precision/test_chart.py` compares it with real tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.layer_kinds import mlp_is_separate
from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config, ModelConfig
from megatron_fp8.precision.chart_rows import (
    FP32_BYTES,
    ChartRow,
    Collective,
    Direction,
    Format,
    Formats,
    Gemm,
    Group,
    Note,
    Operand,
    Per,
    Phase,
    Scales,
    Section,
    Tensor,
)
from megatron_fp8.precision.policy import build_policy

# Operand slots of a layer in TE's histories: three forward and two backward for each of its four linear layers, and as
# many for three GEMMs of attention, which are kept although attention runs outside FP8.
AMAXES_PER_LAYER = 5 * (4 + 3)
# The two operands of each GEMM.
GEMM_OPERANDS = {
    Gemm.FPROP: (Operand.INPUT, Operand.WEIGHT),
    Gemm.DGRAD: (Operand.GRAD, Operand.WEIGHT),
    Gemm.WGRAD: (Operand.GRAD, Operand.INPUT),
}
_GATHERED_BLOCK = {"blockwise": 128, "mxfp8": 32}
_TWICE = 2  # a layer has two column-parallel and two row-parallel linear layers


def precision_chart(config: Config, layout: Layout) -> list[ChartRow]:
    """Every row, in the order in which they are shown."""
    formats = run_formats(config)
    return [
        *_gemm_rows(formats),
        *collective_rows(config, layout, formats),
        *weight_rows(config, layout, formats),
        *activation_rows(config, layout, formats),
        *logits_rows(layout, formats),
    ]


def run_formats(config: Config) -> Formats:
    """The formats of a run."""
    return Formats(build_policy(config.precision, config.model.num_layers), config.model.num_layers)


def _gemm_rows(formats: Formats) -> Iterator[ChartRow]:
    """Operands of a layer's linear layers, of those kept out of FP8, of attention, and of the head."""
    section, params, per = Section.GEMM_OPERANDS, formats.params, Per.ELEMENT
    for gemm, operands in GEMM_OPERANDS.items():
        for operand in operands:
            name = formats.operand(gemm, operand)
            size = formats.element_bytes(name, operand)
            scales = formats.scales(name)
            yield ChartRow(section, Tensor.GEMM_OPERAND, name, size, per, scales, gemm=gemm, operand=operand)
    outside = formats.num_layers - formats.num_fp8_layers
    if formats.num_fp8_layers and outside:
        tensor = Tensor.OPERANDS_OUTSIDE_FP8
        yield ChartRow(section, tensor, params, float(params.bytes), per, num_layers=outside)
    for tensor in (Tensor.ATTENTION_OPERANDS, Tensor.HEAD_OPERANDS):
        yield ChartRow(section, tensor, params, float(params.bytes), per)


def collective_rows(config: Config, layout: Layout, formats: Formats) -> Iterator[ChartRow]:
    """Tensor-, pipeline- and data-parallel communication of this layout. Scalars (losses, norms) are left out."""
    params, hidden, tp = formats.params, config.model.hidden_size, layout.tensor_model_parallel_size
    if tp > 1:
        if config.parallel.sequence_parallel:
            yield from _sequence_parallel(config, layout, formats)
        else:
            size = float(_TWICE * hidden * params.bytes)
            for phase, tensor in ((Phase.FORWARD, Tensor.LINEAR_OUTPUT), (Phase.BACKWARD, Tensor.LINEAR_INPUT_GRAD)):
                yield message_row(Group.TP, Collective.ALL_REDUCE, tensor, params, size, Per.TOKEN_AND_LAYER, phase)
        yield from _outside_layers(config, formats)
    if layout.pipeline_model_parallel_size > 1:
        size = hidden * params.bytes / (tp if config.parallel.sequence_parallel else 1)
        yield message_row(
            Group.PP, Collective.SEND, Tensor.RESIDUAL_STREAM, params, size, Per.TOKEN_AND_STAGE, Phase.EACH_WAY
        )
    yield from _data_parallel(config, layout, formats)
    delayed = formats.fp8 is not None and formats.fp8.recipe == "delayed"
    if delayed and config.precision.amax_reduction != "off" and layout.data_parallel_size * tp > 1:
        size = float(AMAXES_PER_LAYER * FP32_BYTES)
        yield message_row(
            Group.TP_AND_DP, Collective.ALL_REDUCE_MAX, Tensor.AMAXES, Format.FP32, size, Per.LAYER_AND_STEP
        )


def message_row(
    group: Group,
    collective: Collective,
    tensor: Tensor,
    name: Format,
    size: float,
    per: Per,
    phase: Phase | None = None,
    scales: Scales | None = None,
) -> ChartRow:
    """A row of communication; `size`: of the whole tensor."""
    section = Section.COMMUNICATION
    return ChartRow(section, tensor, name, size, per, scales, collective=collective, group=group, phase=phase)


def _sequence_parallel(config: Config, layout: Layout, formats: Formats) -> Iterator[ChartRow]:
    """A gather before each column-parallel GEMM, again for wgrad, and of each row-parallel output's gradient."""
    hidden, params, fp8, per = config.model.hidden_size, formats.params, formats.fp8, Per.TOKEN_AND_LAYER
    value, again, grad = (
        _gathered(formats.operand(gemm, operand), layout, formats, hidden)
        for gemm, operand in ((Gemm.FPROP, Operand.INPUT), (Gemm.WGRAD, Operand.INPUT), (Gemm.DGRAD, Operand.GRAD))
    )
    # Blocks are scaled along rows for dgrad and along columns for wgrad: bytes of both are gathered.
    both = fp8 is not None and fp8.recipe in _GATHERED_BLOCK and grad.is_fp8
    rows, columns = formats.token_bytes(grad, hidden, "rows"), formats.token_bytes(grad, hidden, "columns")
    for tensor, phase, name, size in (
        (Tensor.LINEAR_INPUT, Phase.FORWARD, value, formats.token_bytes(value, hidden, "rows")),
        (Tensor.LINEAR_INPUT_FOR_WGRAD, Phase.BACKWARD, again, formats.token_bytes(again, hidden, "columns")),
        (Tensor.LINEAR_OUTPUT_GRAD, Phase.BACKWARD, grad, rows + columns if both else rows),
    ):
        yield message_row(
            Group.TP, Collective.ALL_GATHER, tensor, name, _TWICE * size, per, phase, formats.scales(name)
        )
    size = float(_TWICE * hidden * params.bytes)
    for phase, tensor in ((Phase.FORWARD, Tensor.LINEAR_OUTPUT), (Phase.BACKWARD, Tensor.LINEAR_INPUT_GRAD)):
        yield message_row(Group.TP, Collective.REDUCE_SCATTER, tensor, params, size, per, phase)
    if fp8 is not None and fp8.recipe == "tensorwise":
        size, per = float(2 * _TWICE * FP32_BYTES), Per.LAYER_AND_MICROBATCH
        yield message_row(Group.TP, Collective.ALL_REDUCE_MAX, Tensor.AMAXES, Format.FP32, size, per)


def _gathered(name: Format, layout: Layout, formats: Formats, hidden: int) -> Format:
    """The format that TE gathers in: the parameters' where a shard is not divisible into blocks."""
    fp8 = formats.policy.fp8
    block = _GATHERED_BLOCK.get(fp8.recipe, 1) if fp8 is not None else 1
    tokens = layout.seq_length_per_rank * layout.micro_batch_size
    return formats.params if hidden % block or tokens % block else name


def _outside_layers(config: Config, formats: Formats) -> Iterator[ChartRow]:
    """Embedding, head and cross entropy over a vocabulary that is sharded."""
    params, per = formats.params, Per.TOKEN
    size = float(config.model.hidden_size * params.bytes)
    yield message_row(Group.TP, Collective.ALL_REDUCE, Tensor.EMBEDDING_OUTPUT, params, size, per)
    if config.parallel.sequence_parallel:
        yield message_row(Group.TP, Collective.ALL_GATHER, Tensor.HEAD_INPUT, params, 2 * size, per, Phase.BOTH)
        yield message_row(Group.TP, Collective.REDUCE_SCATTER, Tensor.HEAD_INPUT_GRAD, params, size, per)
    else:
        yield message_row(Group.TP, Collective.ALL_REDUCE, Tensor.HEAD_INPUT_GRAD, params, size, per)
    size = 3.0 * FP32_BYTES
    yield message_row(Group.TP, Collective.ALL_REDUCE, Tensor.CROSS_ENTROPY_SUMS, Format.FP32, size, per)


def _data_parallel(config: Config, layout: Layout, formats: Formats) -> Iterator[ChartRow]:
    if layout.data_parallel_size == 1:
        return
    grads, per = Format(formats.policy.optimizer.main_grads), Per.PARAMETER
    distributed = config.parallel.use_distributed_optimizer
    collective = Collective.REDUCE_SCATTER if distributed else Collective.ALL_REDUCE
    yield message_row(Group.DP, collective, Tensor.GRADS, grads, float(grads.bytes), per)
    if not distributed:
        return
    apart = formats.fp8 is not None and formats.fp8.param_gather
    if apart:
        yield message_row(Group.DP, Collective.ALL_GATHER, Tensor.FP8_PARAMETERS, Format.E4M3, 1.0, per)
    tensor, params = Tensor.OTHER_PARAMETERS if apart else Tensor.ALL_PARAMETERS, formats.params
    yield message_row(Group.DP, Collective.ALL_GATHER, tensor, params, float(params.bytes), per)


def weight_rows(config: Config, layout: Layout, formats: Formats) -> Iterator[ChartRow]:
    """What a rank holds of each parameter: weights, FP8 copies, master weights, gradients, moments."""
    yield from _weights(formats)
    optimizer, section, per = formats.policy.optimizer, Section.PARAMETERS, Per.PARAMETER
    shards = layout.data_parallel_size if config.parallel.use_distributed_optimizer else 1
    if formats.params is Format.FP32:
        yield ChartRow(section, Tensor.MASTER_WEIGHTS, Format.FP32, 0.0, per, note=Note.WEIGHTS_THEMSELVES)
    else:
        masters = Format(optimizer.main_params)
        yield ChartRow(section, Tensor.MASTER_WEIGHTS, masters, masters.bytes / shards, per, num_shards=shards)
    grads = Format(optimizer.main_grads)
    yield ChartRow(section, Tensor.WEIGHT_GRADS, grads, float(grads.bytes), per)
    for tensor, kept in ((Tensor.FIRST_MOMENT, optimizer.exp_avg), (Tensor.SECOND_MOMENT, optimizer.exp_avg_sq)):
        name, scales = (Format.E4M3, Scales.FP32_PER_TENSOR) if kept == "fp8" else (Format(kept), None)
        yield ChartRow(section, tensor, name, name.bytes / shards, per, scales, num_shards=shards)


def _weights(formats: Formats) -> Iterator[ChartRow]:
    section, params, fp8, per = Section.PARAMETERS, formats.params, formats.fp8, Per.PARAMETER
    size = float(params.bytes)
    if fp8 is None:
        yield ChartRow(section, Tensor.WEIGHTS, params, size, per)
        return
    element, name = formats.element_bytes(Format.E4M3, Operand.WEIGHT), Format.E4M3
    scales = formats.scales(name)
    if fp8.param_gather:
        yield ChartRow(section, Tensor.FP8_LINEAR_WEIGHTS, name, element, per, scales)
    else:
        yield ChartRow(section, Tensor.FP8_LINEAR_WEIGHTS, params, size, per)
        if not fp8.override.fprop:
            yield ChartRow(section, Tensor.FP8_COPY, name, element, per, scales)
    if not fp8.override.dgrad:
        note = Note.ONLY_IF_TRANSPOSED if scales is Scales.FP32_PER_TENSOR else None
        yield ChartRow(section, Tensor.FP8_TRANSPOSE, name, element, per, scales, note=note)
    yield ChartRow(section, Tensor.OTHER_WEIGHTS, params, size, per)


def activation_rows(config: Config, layout: Layout, formats: Formats) -> Iterator[ChartRow]:
    """What a layer keeps per token for its backward pass; with recomputation, what a recomputed layer keeps first.

    Attention is that of fused kernels (and of the stand-in): query, key, value, output and one FP32 statistic per head
    and token are kept, scores are recomputed. Dropout masks are left out.
    """
    model, tp = config.model, layout.tensor_model_parallel_size
    shared = tp if config.parallel.sequence_parallel else 1
    hidden = model.hidden_size // shared
    params, size = formats.params, formats.params.bytes
    if model.recompute_granularity == "full" and model.recompute_num_layers != 0:
        yield _kept(Tensor.RECOMPUTED_LAYER_INPUT, params, float(hidden * size))
        if model.recompute_num_layers is None or model.recompute_num_layers >= layout.layers_per_chunk:
            return
    heads = layout.attention_heads_per_rank
    attention = heads * layout.kv_channels
    qkv, ffn, fc1 = layout.qkv_rows // tp, layout.ffn_hidden_size_per_rank, layout.fc1_rows // tp
    yield from _kept_by_norms(model, layout, params, hidden, shared)
    for tensor, features, divided_over, in_mlp_rows in (
        (Tensor.QKV_INPUT, model.hidden_size, shared, None),
        (Tensor.PROJ_INPUT, attention, 1, None),
        (Tensor.FC1_INPUT, model.hidden_size, shared, Tensor.FC1_INPUT_ROWS),
        (Tensor.FC2_INPUT, ffn, 1, Tensor.FC2_INPUT_ROWS),
    ):
        yield from _kept_input(formats, tensor, features, divided_over, in_mlp_rows)
    yield _kept(Tensor.QUERY_KEY_VALUE, params, float(qkv * size))
    yield _kept(Tensor.ATTENTION_OUTPUT, params, float(attention * size))
    yield _kept(Tensor.SOFTMAX_STATISTICS, Format.FP32, float(heads * FP32_BYTES))
    yield _kept(Tensor.FC1_OUTPUT, params, float(fc1 * size))
    if mlp_is_separate(model) and fc1 != ffn:
        yield _kept(Tensor.ACTIVATED_GATE, params, float(ffn * size))


def _kept_by_norms(model: ModelConfig, layout: Layout, params: Format, hidden: int, shared: int) -> Iterator[ChartRow]:
    """Inputs and statistics of norms. Attention and MLP in parallel have one input, and a norm each all the same."""
    size, per_norm = params.bytes, 2 if model.normalization == "LayerNorm" else 1
    num_before = 0 if model.norm_placement == "post" else 2
    num_after = 0 if model.norm_placement == "pre" else 2
    num_inputs = 1 if num_before and model.parallel_attention_mlp != "none" else num_before
    if num_inputs:
        yield _kept(Tensor.NORM_INPUTS, params, float(num_inputs * hidden * size))
    if num_after:
        yield _kept(Tensor.OUTPUT_NORM_INPUTS, params, float(num_after * hidden * size))
    yield _kept(Tensor.NORM_STATISTICS, Format.FP32, (num_before + num_after) * per_norm * FP32_BYTES / shared)
    heads = layout.attention_heads_per_rank + layout.query_groups_per_rank
    if model.qk_layernorm == "all_heads":
        # In FP32, before and after the division by their root mean square.
        yield _kept(Tensor.QUERY_KEY_NORMS, Format.FP32, float(2 * heads * layout.kv_channels * FP32_BYTES))
    elif model.qk_layernorm != "none":
        statistics = heads * per_norm * FP32_BYTES
        yield _kept(Tensor.QUERY_KEY_NORMS, params, float(heads * layout.kv_channels * size + statistics))


def _kept(tensor: Tensor, name: Format, size: float, scales: Scales | None = None) -> ChartRow:
    return ChartRow(Section.KEPT_FOR_BACKWARD, tensor, name, size, Per.TOKEN_AND_LAYER, scales)


def _kept_input(
    formats: Formats, tensor: Tensor, features: int, divided_over: int, in_mlp_rows: Tensor | None
) -> Iterator[ChartRow]:
    """wgrad reads columns; TE's LayerNormMLP keeps the rows too where they are other bytes."""
    rows, columns = formats.operand(Gemm.FPROP, Operand.INPUT), formats.operand(Gemm.WGRAD, Operand.INPUT)
    if tensor is Tensor.PROJ_INPUT and columns is formats.params:
        return  # attention's output itself

    def kept(kind: Tensor, name: Format, direction: Direction) -> ChartRow:
        return _kept(kind, name, formats.token_bytes(name, features, direction) / divided_over, formats.scales(name))

    yield kept(tensor, columns, "columns")
    in_blocks = formats.fp8 is not None and formats.fp8.recipe in _GATHERED_BLOCK and columns is not formats.params
    if in_mlp_rows is not None and (rows is not columns or in_blocks):
        yield kept(in_mlp_rows, rows, "rows")


def logits_rows(layout: Layout, formats: Formats) -> Iterator[ChartRow]:
    """The head's output and what the cross entropy makes of it, per token."""
    vocab, section, params = layout.padded_vocab_size_per_rank, Section.LOGITS, formats.params
    yield ChartRow(section, Tensor.HEAD_OUTPUT, params, float(vocab * params.bytes), Per.TOKEN)
    yield ChartRow(section, Tensor.LOGITS, Format.FP32, float(vocab * FP32_BYTES), Per.TOKEN)
