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
    """Days, or hours or minutes where they are few."""
    if days >= 2:
        return f"{days:,.1f} days"
    hours = 24 * days
    return f"{hours:.1f} hours" if hours >= 2 else f"{60 * hours:.1f} minutes"


def in_percent(share: float) -> str:
    """A share of one."""
    return f"{100 * share:.1f} %"
