"""Lists every series of a run: name, unit, title, kind, and where it is shown.

The console, the live line, `report.html`, TensorBoard, wandb's dashboard and `compare_runs` read what they show from
here; a new series needs no other change than its entry. Names are the record's keys, which are Megatron's; the step of
a series is its record's iteration. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from megatron_fp8.report.events import format_seconds, short_count
from megatron_fp8.report.record import Record, iteration_of
from megatron_fp8.report.series import Better, Column, Kind, Match, Registry, Section, Series

NOT_FINITE = ("nan", "inf", "-inf")
# Prefix of the series by event; other events have no series.
SERIES_EVENTS = {
    "train": "",
    "validation": "",
    "fp8": "",
    "norms": "",
    "fp8-check": "",
    "checkpoint": "checkpoint/",
    "startup": "startup/",
}

LOSS, VALIDATION, PERPLEXITY = "lm loss", "lm loss validation", "lm loss validation ppl"
STEP_TIME, STEP_PARTS = "iteration-time", "Parts of a step"
_KINDS = ("embedding", "qkv", "proj", "fc1", "fc2", "norms", "head")
_LAYER_KINDS = tuple({"tensor": kind} for kind in _KINDS[1:-1])
_LINEARS = ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")
_OPERANDS = tuple({"tensor": f"{each}/{kind}"} for each in _LINEARS for kind in ("input", "weight", "grad_output"))
_LOWER, _HIGHER = Better.LOWER, Better.HIGHER
_TRAINING, _THROUGHPUT, _NORMS, _FP8 = Section


def _machine(name: str, title: str, unit: str, better: Better | None = None, **more: Any) -> Series:
    return Series(name, title, unit, Kind.MACHINE, better, **{"section": _THROUGHPUT, **more})


def _norms(name: str, title: str) -> Iterator[Series]:
    kinds = tuple({"kind": kind} for kind in _KINDS)
    more: dict[str, Any] = {"event": "norms", "section": _NORMS}
    yield Series(
        f"{name}/layers.{{layer}}/{{tensor}}", f"{title} by layer", kind=Kind.HEAT, better=_LOWER,
        log2=True, members=_LAYER_KINDS, heat_map=f"norm map/{{tensor}}/{name}", **more,
    )  # fmt: skip
    yield Series(f"{name}/{{kind}}", f"{title} by kind of weight", members=kinds, **more)


def _fp8(quantity: str, title: str, better: Better = _LOWER, event: str = "fp8", **more: Any) -> Series:
    if more.pop("mapped", False):
        mapped: dict[str, Any] = {"section": _FP8, "members": _OPERANDS, "heat_map": f"fp8 map/{{tensor}}/{quantity}"}
        more |= mapped
    name = f"fp8/layers.{{layer}}/{{tensor}}/{quantity}"
    return Series(name, title, kind=Kind.HEAT, better=better, event=event, **more)


_RANKS = "Compute time of the fastest and the slowest rank"
_PERCENT = 100.0
_GB = 1e-9
# Quantities of other versions of this package.
OTHER_FP8 = Series("fp8/layers.{layer}/{tensor}/{quantity}", "{quantity} by layer", kind=Kind.HEAT, better=_LOWER)
REGISTRY = Registry([
    Series(
        LOSS, "Loss", "nats per token", better=_LOWER, note="Training and validation.", section=_TRAINING,
        console=Column("lm loss {:.4f}"), live=Column("loss {:.4f}", worth=8, style="bold"),
    ),
    Series(
        VALIDATION, "Loss", "nats per token", better=_LOWER, event="validation", section=_TRAINING,
        console=Column("lm loss validation {:.4f}"), live=Column("val {:.4f}", minimum=0.0, worth=1),
    ),
    Series(PERPLEXITY, "Validation perplexity", "", better=_LOWER, event="validation", section=_TRAINING,
           in_report=False),
    Series(f"{PERPLEXITY}/{{set}}", "Validation perplexity", better=_LOWER, event="validation", in_report=False),
    Series(f"{VALIDATION}/{{set}}", "Loss", "nats per token", better=_LOWER, event="validation",
           console=Column("{name} {:.4f}")),
    Series("grad-norm", "Gradient norm before clipping", section=_TRAINING, console=Column("grad-norm {:.3f}"),
           note="Global L2 norm of the last step of the interval."),
    Series("params-norm", "Norm of the master weights", event="norms", section=_NORMS, note="Global L2 norm."),
    *_norms("grad-norm", "Gradient norm"),
    *_norms("params-norm", "Norm of the master weights"),
    Series("learning-rate", "Learning rate", section=_TRAINING, console=Column("learning-rate {:.2e}"),
           note="Of the last step of the interval."),
    Series("loss-scale", "Loss scale", section=_TRAINING, note="Of the next step.",
           console=Column("loss-scale {:g}", minimum=0.0)),
    Series(
        "skipped-iterations", "Skipped steps", "steps", Kind.COUNTER, _LOWER, section=_TRAINING,
        note="Since the start of the run.", only_if_changing=True, console=Column("skipped-iterations {:g}", 1),
        live=Column("skipped {:.0f}", 1, worth=3, style="yellow"),
    ),
    Series("consumed-tokens", "Consumed tokens", "tokens", Kind.COUNTER, section=_TRAINING, in_report=False),
    Series("consumed-samples", "Consumed samples", "samples", Kind.COUNTER, in_report=False),
    Series("batch-size", "Global batch size", "samples", section=_TRAINING, only_if_changing=True),
    _machine(
        "tokens-per-second", "Throughput", "tokens/s", _HIGHER, console=Column("tokens/s {:,.0f}"),
        note="All ranks, without pauses for evaluation and checkpoints.",
        live=Column(lambda value: f"{short_count(value)} tok/s", worth=4),
    ),
    _machine("tokens-per-second-per-gpu", "Throughput per GPU", "tokens/s", _HIGHER, in_report=False),
    _machine("throughput", "Model FLOPs", "TFLOP/s per GPU", _HIGHER, note="Without activation recomputation."),
    _machine("mfu", "Model FLOPs utilization", "%", _HIGHER, scale=_PERCENT, live=Column("MFU {:.0%}", 0.0, worth=2),
             note="Share of the dense peak in the format of the blocks' GEMMs."),
    _machine(STEP_TIME, "Time per step", "s", _LOWER, note="Without pauses for evaluation and checkpoints."),
    *(
        _machine(f"{name}-time", STEP_PARTS, "s", _LOWER, note="They add up to the time per step.")
        for name in ("batch-generator", "forward-backward", "all-grads-sync", "optimizer", "other")
    ),
    _machine("forward-backward-time/{part}", "Parts of forward and backward", "s", _LOWER),
    _machine("optimizer-time/{part}", "Parts of the optimizer step", "s", _LOWER),
    _machine("compute-time/{rank}", _RANKS, "s", _LOWER, members=({"rank": "fastest-rank"}, {"rank": "slowest-rank"})),
    _machine("slowest-rank", "Slowest rank", "rank", section=None, only_if_changing=True,
             note="The rank whose own forward and backward passes take longest."),
    _machine("data-wait-share", "Time waiting for data", "%", _LOWER, scale=_PERCENT, in_report=False,
             console=Column("waits for data {:.0%}", minimum=0.05)),
    _machine("data-wait-seconds", "Time waiting for data since the last record", "s", _LOWER, section=None,
             in_report=False),
    _machine("pause-seconds", "Pauses", "s", _LOWER, note="Since the last record."),
    _machine("pause-seconds/{reason}", "Pauses", "s", _LOWER),
    _machine("checkpoint/hold-up-seconds", "Training held up by a checkpoint", "s", _LOWER, event="checkpoint"),
    _machine("checkpoint/seconds", "Time to write a checkpoint", "s", _LOWER, event="checkpoint", section=None),
    _machine("checkpoint/bytes", "Size of a checkpoint", "GB", scale=_GB, event="checkpoint", section=None),
    _machine("startup/seconds", "Time to start, first step included", "s", _LOWER, event="startup", section=None),
    _machine("startup/{part}-seconds", "Parts of the start", "s", _LOWER, event="startup", section=None),
    _machine("peak-memory-bytes", "Peak memory", "GB", _LOWER, scale=_GB, note="Since the start; GB: 1e9 bytes."),
    _machine("peak-memory-bytes/largest", "Peak memory", "GB", _LOWER, scale=_GB),
    _machine("pipeline-bubble", "Pipeline bubble", "%", _LOWER, scale=_PERCENT, only_if_changing=True,
             note="Idle share of a step with equally fast stages, and as measured."),
    _machine("pipeline-bubble/measured", "Pipeline bubble", "%", _LOWER, scale=_PERCENT),
    _machine("node/{node}/{quantity}", "{quantity} of nodes", "", section=None),
    _machine("seconds-left", "Time left", "s", section=None, in_report=False, in_dashboards=False,
             console=Column(lambda value: f"time left {format_seconds(value)}"),
             live=Column(lambda value: f"{format_seconds(value)} left", worth=7)),
    Series("fp8/fallen-back-layers", "Layers that fell back to BF16", "layers", better=_LOWER, event="fp8-check",
           section=_FP8),
    _fp8("amax", "amax by layer", log2=True, mapped=True),
    _fp8("scale", "scale by layer", _HIGHER, log2=True, mapped=True),
    _fp8("head-room-bits", "headroom in bits (below 0: it would clip) by layer", _HIGHER),
    _fp8("history-max", "largest amax of the history by layer", log2=True),
    _fp8("clipped", "share clipped by layer", event="fp8-check", mapped=True),
    _fp8("flushed", "share flushed to 0 by layer", event="fp8-check", mapped=True),
    _fp8("error", "relative error of quantization by layer", event="fp8-check"),
    _fp8("sqnr-db", "signal-to-quantization-noise ratio in dB by layer", _HIGHER, event="fp8-check"),
    OTHER_FP8,
])  # fmt: skip


def find(name: str) -> Match | None:
    """The entry of a series of this run's records."""
    return REGISTRY.find(name)


def series_of(record: Record) -> tuple[int, dict[str, float]] | None:
    """(step, value by series) for dashboards, without withheld values (null); None for a record without series."""
    event = str(record["event"])
    if event not in SERIES_EVENTS:
        return None
    values = {}
    for name, value in named_values(record):
        found = find(name)
        # A key of two kinds of record is a series of one of them.
        listed = found is None or (found.series.in_dashboards and found.series.event == event)
        if listed and is_number(value):
            values[name] = float(value)
    return iteration_of(record, 0), values


def named_values(record: Record) -> Iterator[tuple[str, Any]]:
    """Names and values of a record's series; a list of layers counts as its length."""
    prefix = SERIES_EVENTS.get(record["event"], "")
    for key, value in record.items():
        if key not in ("event", "time", "iteration"):
            yield (f"fp8/{key}", len(value)) if key == "fallen-back-layers" else (prefix + key, value)


def line_columns(values: Mapping[str, Any], line: Literal["console", "live"]) -> list[tuple[Column, str]]:
    """The columns of a line for these values, in the registry's order, with their texts."""
    shown = []
    for name, value in values.items():
        found = find(name)
        column: Column | None = None if found is None else getattr(found.series, line)
        if found is not None and column is not None and (text := column.show(name, value)) is not None:
            shown.append((found.position, column, text))
    return [(column, text) for _, column, text in sorted(shown, key=lambda each: each[0])]


def is_number(value: object) -> bool:
    """Whether it is a number, or the string of one that JSON lacks."""
    return (
        value in NOT_FINITE
        if isinstance(value, str)
        else isinstance(value, int | float) and not isinstance(value, bool)
    )


def layer_maps(values: Mapping[str, float], num_layers: int) -> dict[str, list[float]]:
    """By `fp8 map/<linear layer>/<operand>/<quantity>` and `norm map/<kind>/<quantity>` the values of layers 0 to
    `num_layers` - 1, for wandb, which draws histograms over time as a map of colors: a bin is a layer.

    0 stands for a layer that has no such value (is not in FP8), and for what is not finite.
    """
    maps: dict[str, list[float]] = {}
    for name, value in values.items():
        found = find(name)
        if found is not None and found.series.heat_map:
            row = maps.setdefault(found.series.heat_map.format_map(found.fields), [0.0] * num_layers)
            row[int(found.fields["layer"])] = value if 0 <= value < float("inf") else 0.0
    return maps
