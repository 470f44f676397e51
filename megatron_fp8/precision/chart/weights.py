"""Owns the chart's rows of what is kept of each parameter: weights, copies, masters, gradients, moments. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.precision.chart.rows import ELEMENT_BYTES, ChartRow, Formats

SECTION = "parameters"
PER = "parameter"


def weight_rows(config: Config, layout: Layout, formats: Formats) -> Iterator[ChartRow]:
    """Bytes per parameter that a rank holds."""
    yield from _weights(formats)
    optimizer = formats.policy.optimizer
    shards = layout.data_parallel_size if config.parallel.use_distributed_optimizer else 1
    over = f", divided over {shards} ranks" if shards > 1 else ""
    if formats.params == "fp32":
        yield ChartRow(SECTION, "master weights", "fp32, the weights themselves", 0.0, PER)
    else:
        size = ELEMENT_BYTES[optimizer.main_params] / shards
        yield ChartRow(SECTION, "master weights", optimizer.main_params + over, size, PER)
    grads = optimizer.main_grads
    yield ChartRow(SECTION, "weight gradients", grads, float(ELEMENT_BYTES[grads]), PER)
    for tensor, name in (("first moment", optimizer.exp_avg), ("second moment", optimizer.exp_avg_sq)):
        shown = {"fp8": "e4m3, fp32 scale per tensor"}.get(name, name)
        yield ChartRow(SECTION, f"optimizer's {tensor}", shown + over, ELEMENT_BYTES[name] / shards, PER)


def _weights(formats: Formats) -> Iterator[ChartRow]:
    params, fp8 = formats.params, formats.fp8()
    size = float(ELEMENT_BYTES[params])
    if fp8 is None:
        yield ChartRow(SECTION, "weights", params, size, PER)
        return
    element = formats.element("e4m3", "weight")
    name = formats.scaled("e4m3")
    if fp8.param_gather:
        yield ChartRow(SECTION, "weights of FP8 linear layers", name, element, PER)
    else:
        yield ChartRow(SECTION, "weights of FP8 linear layers", params, size, PER)
        if not fp8.override.fprop:
            yield ChartRow(SECTION, "their FP8 copy, rows (fprop)", name, element, PER)
    if not fp8.override.dgrad:
        per_tensor = fp8.recipe in ("delayed", "tensorwise")
        note = "; none where GEMMs read any layout (Blackwell, CPU stand-in)" if per_tensor else ""
        yield ChartRow(SECTION, "their FP8 copy, columns (dgrad)", name + note, element, PER)
    yield ChartRow(SECTION, "other weights", params, size, PER)
