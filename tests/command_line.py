"""Runs a command's `main` in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def exit_code(main: Callable[[Sequence[str]], None], *arguments: object) -> int:
    """The exit code with which `main` ends for these arguments."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0
