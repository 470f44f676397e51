"""Owns how a duration is written for people."""


def format_seconds(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
