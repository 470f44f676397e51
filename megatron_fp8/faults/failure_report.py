"""Reports the failure of a rank: its traceback where the launcher looks for it, and a quick end of its process.

Under `torchrun` the first failing rank's traceback is what the launcher prints last: torch's `record` leaves it in
the file that the launcher reads. Must not know what was running.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

import torch.distributed
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record

from megatron_fp8.errors import BadInputError
from megatron_fp8.faults.exit_codes import ExitCode

Result = TypeVar("Result")

# The launcher sees a failed rank within tenths of a second and ends the others of its machine.
SECONDS_FOR_THE_CAUSE = 10.0


def run_reporting(job: Callable[[], Result], rank: int) -> Result:
    """Run `job` and return its result; on an exception print it with the rank and end the process at once.

    The exit code is then `ExitCode.FAILED`.
    A BadInputError speaks for itself: its text, no traceback, `ExitCode.BAD_INPUT`.
    Ends without Python's shutdown, which can wait for ever for collectives that other ranks no longer answer.
    """
    try:
        result = record(lambda: _cause_first(job))()
        # torch's decorator, which raises all the same, says that it may return None.
        return cast("Result", result)
    except BadInputError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(ExitCode.BAD_INPUT)
    except Exception:  # noqa: BLE001 - whatever it is, it is printed whole
        lines = traceback.format_exc()
        print(f"rank {rank} failed:\n{lines}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(ExitCode.FAILED)


def end_with(error: Exception) -> NoReturn:
    """End the process at once, from any thread, with `error` where the launcher looks for the reason.

    What there is to say must have been said.
    """
    try:
        raise error
    except type(error):
        get_error_handler().record_exception(error)
        os._exit(ExitCode.FAILED)


def _cause_first(job: Callable[[], Result]) -> Result:
    """Run `job`; raise what comes of another rank's end only after that rank has had time to report its own error.

    The launcher takes the error with the earliest time, in whole seconds, for the cause; a connection that a failing
    rank closed is noticed within the same second.
    """
    try:
        return job()
    except Exception as error:
        if is_consequence(error):
            time.sleep(SECONDS_FOR_THE_CAUSE)
        raise


def is_consequence(error: Exception) -> bool:
    """Whether `error` says that another rank does not answer any more, rather than that this one failed."""
    # gloo has no exception class of its own; its messages begin with the source file.
    return isinstance(error, torch.distributed.DistError) or "/gloo/" in str(error)
