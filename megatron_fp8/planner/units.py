"""Owns how numbers of a plan are written, each with its unit. Imports no torch."""

from __future__ import annotations

_GIB, _MIB, _KIB = 2**30, 2**20, 2**10


def in_bytes(size: float) -> str:
    """Bytes in the largest binary unit of which there is one: 1.50 GiB, 12.0 KiB."""
    for unit, name, digits in ((_GIB, "GiB", 2), (_MIB, "MiB", 1), (_KIB, "KiB", 1)):
        if size >= unit:
            return f"{size / unit:,.{digits}f} {name}"
    return f"{size:,.0f} B"


def in_flops(flops: float) -> str:
    """FLOPs in the largest unit of which there is one: 48.2 GFLOP."""
    for unit, name in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if flops >= unit:
            return f"{flops / unit:,.2f} {name}"
    return f"{flops:,.0f} FLOP"


def in_tokens(tokens: float) -> str:
    """A number of tokens: 1.00 trillion tokens, 15,000,000 tokens."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion")):
        if tokens >= unit:
            return f"{tokens / unit:,.2f} {name} tokens"
    return f"{tokens:,.0f} tokens"


def in_days(days: float) -> str:
    """Days, or the largest smaller unit of which there are two."""
    for unit, name in ((1, "days"), (24, "hours"), (24 * 60, "minutes")):
        if days * unit >= 2:
            return f"{days * unit:,.1f} {name}"
    return f"{days * 86400:.2f} seconds"


def in_gpu_hours(hours: float) -> str:
    """GPU-hours, with digits after the point where they are few."""
    return f"{hours:,.0f} GPU-hours" if hours >= 10 else f"{hours:.3g} GPU-hours"


def in_percent(share: float) -> str:
    """A share of one."""
    return f"{100 * share:.1f} %"
