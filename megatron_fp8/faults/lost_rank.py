"""Owns what a rank says when another one does not answer any more: who waited, where, for how long, what to look at.

Libraries say which socket or which operation; a person wants the step, the machine and the key of the timeout. Must not
know why the other rank ended.
"""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed

from megatron_fp8.faults.heartbeat import Heartbeat
from megatron_fp8.faults.report import is_consequence


class LostRankError(torch.distributed.DistNetworkError):
    """Another rank ended, or cannot be reached."""


@contextmanager
def explaining_lost_ranks(heartbeat: Heartbeat, timeout_minutes: float) -> Iterator[None]:
    """Raise a LostRankError in the place of an error that says that another rank does not answer.

    `timeout_minutes`: parallel.distributed_timeout_minutes.
    """
    try:
        yield
    except Exception as error:
        if not is_consequence(error):
            raise
        beat = heartbeat.beat
        rank, host = torch.distributed.get_rank(), socket.gethostname()
        step = f"iteration {beat.iteration}, " if beat.iteration else ""
        raise LostRankError(
            f"rank {rank} on {host}, {step}phase {beat.phase.value}: another rank does not answer, after "
            f"{time.monotonic() - beat.at:.1f} s: {error}\n"
            "    why: its process or its machine has ended, or the network between the machines is interrupted\n"
            "    look at: the earliest error of all nodes, which is the cause; a machine that says nothing.\n"
            f"         An operation between ranks may take parallel.distributed_timeout_minutes={timeout_minutes:g}"
        ) from error
