"""Owns the processes of the comparison: each call in a process of its own, some at a time. Imports no torch.

A process's output goes to a log, of which the end is shown when it fails. Must not know what is computed.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

_LOG_LINES = 25


@dataclass(frozen=True)
class Failure:
    """A call that gave no result. `bad_input`: a person's mistake, which `text` explains; else the end of its log."""

    text: str
    bad_input: bool = False


@dataclass(frozen=True)
class _Running:
    index: int
    process: SpawnProcess
    log: Path


def run_in_processes(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    num_jobs: int,
    on_step: Callable[[int, int], None],
    on_end: Callable[[int, Any], None],
) -> None:
    """Call `function(*arguments[i], report)` for every i, `num_jobs` at a time, in their order.

    `report(n)` in the process becomes `on_step(i, n)` here; the result, or a `Failure`, is handed to `on_end(i, ...)`.
    `function` must be importable.
    """
    context = multiprocessing.get_context("spawn")
    running: dict[Connection, _Running] = {}
    waiting = list(enumerate(arguments))
    with tempfile.TemporaryDirectory(prefix="compare-") as directory:
        try:
            while waiting or running:
                while waiting and len(running) < num_jobs:
                    index, values = waiting.pop(0)
                    log = Path(directory) / f"{index}.log"
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(target=_main, args=(sender, log, function, values), daemon=True)
                    process.start()
                    sender.close()
                    running[receiver] = _Running(index, process, log)
                for ready in wait(list(running)):
                    assert isinstance(ready, Connection)
                    _hear(ready, running, on_step, on_end)
        finally:
            for call in running.values():
                call.process.kill()
                call.process.join()


def _hear(
    connection: Connection,
    running: dict[Connection, _Running],
    on_step: Callable[[int, int], None],
    on_end: Callable[[int, Any], None],
) -> None:
    """Take one message of a process."""
    call = running[connection]
    try:
        kind, value = connection.recv()
    except EOFError:
        kind, value = "ended", None
    if kind == "step":
        on_step(call.index, value)
        return
    call.process.join()
    connection.close()
    del running[connection]
    if kind == "ended":
        text = call.log.read_text(errors="replace") if call.log.exists() else ""
        tail = "\n".join(text.splitlines()[-_LOG_LINES:])
        value = Failure(f"its process ended with code {call.process.exitcode}. The end of its log:\n{tail}")
    on_end(call.index, value)


def _main(sender: Connection, log: Path, function: Callable[..., Any], values: tuple[Any, ...]) -> None:
    from megatron_fp8.errors import BadInputError

    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        result = function(*values, lambda number: sender.send(("step", number)))
    except BadInputError as error:
        result = Failure(str(error), bad_input=True)
    except Exception:  # noqa: BLE001 - whatever it is ends this process, and is shown from the log
        traceback.print_exc()
        os._exit(1)
    sender.send(("done", result))
    sender.close()
    # Without Python's shutdown, which can wait for a process group that nobody needs any more.
    os._exit(0)
