"""Owns how a failing rank says so: its traceback where a person finds it, and a quick end of its process.

Under `torchrun` the first failing rank's traceback is what the launcher prints last: torch's `record` leaves it in
the file that the launcher reads. Must not know what was running.
"""

import os
import sys
import traceback
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing.errors import record

from megatron_fp8.faults.exit_codes import ExitCode


def run_reporting(job: Callable[[], object], rank: int) -> None:
    """Run `job`; on an exception print it with the rank and end the process at once with `ExitCode.FAILED`.

    Ends without Python's shutdown, which can wait for ever for collectives that other ranks no longer answer.
    """
    try:
        record(job)()
    except Exception:  # noqa: BLE001 - whatever it is, it is printed whole
        lines = traceback.format_exc()
        print(f"rank {rank} failed:\n{lines}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(ExitCode.FAILED)
