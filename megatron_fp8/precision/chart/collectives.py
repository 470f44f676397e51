"""Owns the chart's rows of what ranks send each other: bytes of the whole tensor that a collective moves. No torch.

Scalars (losses, token counts, gradient norms) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.precision.chart.rows import ELEMENT_BYTES, ChartRow, Formats

SECTION = "communication"
# Operand slots of a block in TE's histories: three forward and two backward for each of the four linear layers, and
# as many for three GEMMs of attention, which are kept although attention runs outside FP8.
AMAXES_PER_LAYER = 5 * (4 + 3)
_GATHERED_BLOCK = {"blockwise": 128, "mxfp8": 32}
_TWICE = 2  # a block has two column-parallel and two row-parallel linear layers


def collective_rows(config: Config, layout: Layout, formats: Formats) -> Iterator[ChartRow]:
    """Tensor-, pipeline- and data-parallel collectives that this layout has."""
    if layout.tensor_model_parallel_size > 1:
        if config.parallel.sequence_parallel:
            yield from _sequence_parallel(config, layout, formats)
        else:
            size = float(_TWICE * config.model.hidden_size * ELEMENT_BYTES[formats.params])
            for direction in ("forward", "backward"):
                yield ChartRow(SECTION, f"TP all-reduce, {direction}", formats.params, size, "token and layer")
        yield from _outside_blocks(config, formats)
    if layout.pipeline_model_parallel_size > 1:
        shared = layout.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
        size = config.model.hidden_size * ELEMENT_BYTES[formats.params] / shared
        yield ChartRow(SECTION, "PP send and receive, each way", formats.params, size, "token and stage")
    yield from _data_parallel(config, layout, formats)
    fp8 = formats.fp8()
    if fp8 is not None and fp8.recipe == "delayed" and _reduces_amaxes(config, layout):
        size = float(AMAXES_PER_LAYER * ELEMENT_BYTES["fp32"])
        yield ChartRow(SECTION, "amax all-reduce (maximum)", "fp32", size, "layer and step")


def _sequence_parallel(config: Config, layout: Layout, formats: Formats) -> Iterator[ChartRow]:
    """A gather before each column-parallel GEMM, again for wgrad, and of each row-parallel output's gradient."""
    hidden = config.model.hidden_size
    fp8 = formats.fp8()
    value = _gathered(formats.operand("fprop", "input"), layout, formats, hidden)
    again = _gathered(formats.operand("wgrad", "input"), layout, formats, hidden)
    grad = _gathered(formats.operand("dgrad", "grad"), layout, formats, hidden)
    # Blocks are scaled along rows for dgrad and along columns for wgrad: bytes of both are gathered.
    both = fp8 is not None and fp8.recipe in _GATHERED_BLOCK and grad in ("e4m3", "e5m2")
    rows, columns = formats.row_of(grad, hidden, "rows"), formats.row_of(grad, hidden, "columns")
    for tensor, name, size in (
        ("TP all-gather, forward: input", value, formats.row_of(value, hidden, "rows")),
        ("TP all-gather, backward: input for wgrad", again, formats.row_of(again, hidden, "columns")),
        ("TP all-gather, backward: gradient", grad, rows + columns if both else rows),
    ):
        yield ChartRow(SECTION, tensor, formats.scaled(name), _TWICE * size, "token and layer")
    size = float(_TWICE * hidden * ELEMENT_BYTES[formats.params])
    for direction in ("forward", "backward"):
        yield ChartRow(SECTION, f"TP reduce-scatter, {direction}", formats.params, size, "token and layer")
    if fp8 is not None and fp8.recipe == "tensorwise":
        size = float(2 * _TWICE * ELEMENT_BYTES["fp32"])
        yield ChartRow(SECTION, "TP all-reduce, amaxes (maximum)", "fp32", size, "layer and micro-batch")


def _outside_blocks(config: Config, formats: Formats) -> Iterator[ChartRow]:
    """The vocabulary is divided: embedding, head and cross entropy."""
    params = formats.params
    size = float(config.model.hidden_size * ELEMENT_BYTES[params])
    yield ChartRow(SECTION, "TP all-reduce of the embedding", params, size, "token")
    if config.parallel.sequence_parallel:
        yield ChartRow(SECTION, "TP all-gather of the head's input, both ways", params, 2 * size, "token")
        yield ChartRow(SECTION, "TP reduce-scatter of the head's input gradient", params, size, "token")
    else:
        yield ChartRow(SECTION, "TP all-reduce of the head's input gradient", params, size, "token")
    yield ChartRow(SECTION, "TP all-reduce in the cross entropy", "fp32", 3.0 * ELEMENT_BYTES["fp32"], "token")


def _gathered(name: str, layout: Layout, formats: Formats, hidden: int) -> str:
    """The format that TE gathers in: the parameters' where a shard does not divide into blocks."""
    fp8 = formats.policy.fp8
    block = _GATHERED_BLOCK.get(fp8.recipe, 1) if fp8 is not None else 1
    tokens = layout.seq_length_per_rank * layout.micro_batch_size
    return formats.params if hidden % block or tokens % block else name


def _data_parallel(config: Config, layout: Layout, formats: Formats) -> Iterator[ChartRow]:
    if layout.data_parallel_size == 1:
        return
    grads = formats.policy.optimizer.main_grads
    collective = "reduce-scatter" if config.parallel.use_distributed_optimizer else "all-reduce"
    yield ChartRow(SECTION, f"DP {collective} of gradients", grads, float(ELEMENT_BYTES[grads]), "parameter")
    if not config.parallel.use_distributed_optimizer:
        return
    fp8 = formats.fp8()
    if fp8 is not None and fp8.param_gather:
        yield ChartRow(SECTION, "DP all-gather of FP8 layers' weights", "e4m3", 1.0, "parameter")
    tensor = (
        "DP all-gather of other parameters" if fp8 is not None and fp8.param_gather else "DP all-gather of parameters"
    )
    yield ChartRow(SECTION, tensor, formats.params, float(ELEMENT_BYTES[formats.params]), "parameter")


def _reduces_amaxes(config: Config, layout: Layout) -> bool:
    if config.precision.amax_reduction == "off":
        return False
    return layout.data_parallel_size * layout.tensor_model_parallel_size > 1
