"""Runs `pretrain.py` and writes which files of the package it enters: before the first step, and in one step.

Usage: traced_pretrain.py OUTPUT CONFIG OVERRIDES. A file is entered when one of its functions is called.
"""

from __future__ import annotations

import inspect
import json
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = f"{Path(__file__).resolve().parents[2]}/megatron_fp8/"


class Trace:
    """Files entered, by phase: `start` before the loop's first step, `step` in the second, its record included."""

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {"start": set(), "step": set()}
        self._phase = "start"
        self._num_steps = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # Bodies of modules and classes, which run when a module is imported, are not optimized code.
        if not code.co_filename.startswith(PACKAGE) or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        name = code.co_filename.removeprefix(PACKAGE)
        is_step = (name, code.co_name) == ("train/loop.py", "_step")
        if event == "call":
            if is_step:
                self._num_steps += 1
                self._phase = "step" if self._num_steps == 2 else ""
            if self._phase:
                self.files[self._phase].add(name)
        elif event == "return" and is_step:
            self._phase = ""


def main() -> None:
    """Trace all threads."""
    output, *arguments = sys.argv[1:]
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    from megatron_fp8.commands.train import main as train

    sys.argv = ["pretrain.py", *arguments]
    try:
        train()
    finally:
        sys.setprofile(None)
        Path(output).write_text(json.dumps({phase: sorted(files) for phase, files in trace.files.items()}))


if __name__ == "__main__":
    main()
