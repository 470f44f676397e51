"""Owns how checks are carried out: in processes of their own, with a time limit, alone and on all ranks together.

A process that dies or hangs is a fault of the check it was at. Must not know what checks look at.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import IO

from megatron_fp8.doctor.checks import ALONE, NEEDS, TOGETHER
from megatron_fp8.doctor.environment import child_environment
from megatron_fp8.doctor.finding import Finding, Status, Surroundings
from megatron_fp8.doctor.machine import gpu_nodes
from megatron_fp8.doctor.worker import GATHER

_ADVICE = "install the versions of the image (docker/), or of locks/"
_MOST_CHARS = 400
_SECONDS_TO_DIE = 20.0
# Of a machine without GPUs: enough that ranks have to meet.
_LOCAL_RANKS_WITHOUT_GPUS = 2
# Ranks of one machine cannot fail of these.
_OF_SEVERAL_MACHINES = ("shared files", "same versions")


@dataclass(frozen=True)
class Patient:
    """What is examined. `launched`: torchrun started this process and its like, else the doctor starts ranks itself."""

    surroundings: Surroundings
    launched: bool
    seconds_per_check: float


def examine(patient: Patient) -> list[list[Finding]]:
    """The findings of every rank, by rank; of this rank alone where the ranks could not tell each other."""
    mine = list(alone(patient))
    faults = {finding.check for finding in mine if finding.status is Status.FAULT}
    if "torch" in faults:
        text = "not looked at: torch has a fault"
        return [[*mine, *(Finding(check, Status.ABSENT, text) for check in TOGETHER)]]
    surroundings = replace(patient.surroundings, findings=tuple(mine))
    if patient.launched:
        return _of_this_rank(mine, list(_answers([*TOGETHER, GATHER], surroundings, patient.seconds_per_check)))
    return [[*mine, *_of_local_ranks(surroundings, patient.seconds_per_check)]]


def alone(patient: Patient) -> Iterator[Finding]:
    """What this rank finds by itself; after a process has died the next one goes on behind the check it was at."""
    faults: set[str] = set()
    waiting = [check for check in ALONE if check != "wandb" or patient.surroundings.rank == 0]
    while waiting:
        for check in list(waiting):
            if NEEDS.get(check) in faults:
                waiting.remove(check)
                faults.add(check)
                yield Finding(check, Status.ABSENT, f"not looked at: {NEEDS[check]} has a fault")
        with closing(_answers(list(waiting), patient.surroundings, patient.seconds_per_check)) as answers:
            for finding in answers:
                assert isinstance(finding, Finding)
                waiting.remove(finding.check)
                yield finding
                if finding.status is Status.FAULT:
                    faults.add(finding.check)
                    break


def _of_this_rank(mine: list[Finding], answers: list[Finding | list]) -> list[list[Finding]]:
    gathered = [answer for answer in answers if isinstance(answer, list)]
    if gathered:
        return [[Finding.from_json(item) for item in rank] for rank in gathered[0]]
    return [[*mine, *(answer for answer in answers if isinstance(answer, Finding))]]


def _of_local_ranks(surroundings: Surroundings, seconds: float) -> list[Finding]:
    """What ranks of this machine, one a GPU, find together: the first one's findings, and the others' faults."""
    num_ranks = len(gpu_nodes()) or _LOCAL_RANKS_WITHOUT_GPUS
    with tempfile.TemporaryDirectory(prefix="doctor-") as directory, ThreadPoolExecutor(num_ranks) as pool:
        meeting = replace(surroundings, world_size=num_ranks, rendezvous=f"file://{directory}/rendezvous")
        ranks = [replace(meeting, rank=rank) for rank in range(num_ranks)]
        checks = [check for check in TOGETHER if check not in _OF_SEVERAL_MACHINES]
        told = list(pool.map(lambda rank: list(_answers(checks, rank, seconds, local=True)), ranks))
    found: dict[str, Finding] = {}
    for rank, answers in enumerate(told):
        for finding in answers:
            assert isinstance(finding, Finding)
            first = found.setdefault(finding.check, finding)
            if finding.status is Status.FAULT and first.status is not Status.FAULT:
                found[finding.check] = replace(finding, text=f"rank {rank}: {finding.text}")
    text = "one machine alone: torchrun starts the doctor on several"
    return [*found.values(), *(Finding(check, Status.ABSENT, text) for check in _OF_SEVERAL_MACHINES)]


def _answers(
    checks: Sequence[str], surroundings: Surroundings, seconds: float, local: bool = False
) -> Generator[Finding | list]:
    """What a process answers to `checks`; its death or silence becomes the last answer, a fault of that check."""
    environment = child_environment(*((surroundings.rank, surroundings.world_size) if local else ()))
    if not checks:
        return
    # A process that hangs is asked to print where.
    environment["PYTHONFAULTHANDLER"] = "1"
    reader, writer = os.pipe()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        command = [sys.executable, "-m", "megatron_fp8.doctor.worker", str(writer)]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[writer], text=True
        )
        os.close(writer)
        try:
            assert process.stdin is not None
            with process.stdin as channel:
                channel.write(json.dumps({"checks": checks, "surroundings": surroundings.as_json()}) + "\n")
            lines = _Lines(reader)
            for check in checks:
                line = lines.next(time.monotonic() + seconds)
                if not line:
                    yield _death(check, process, log, hung_seconds=None if line is not None else seconds)
                    return
                answer = json.loads(line)
                yield answer if isinstance(answer, list) else Finding.from_json(answer)
        finally:
            process.kill()
            process.wait()
            os.close(reader)


class _Lines:
    """Lines of a pipe, each waited for until a deadline."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read = b""

    def next(self, deadline: float) -> bytes | None:
        """The next line; an empty one at the pipe's end, None when the deadline has passed."""
        while b"\n" not in self._read:
            ready = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                return None
            piece = os.read(self._descriptor, 1 << 16)
            if not piece:
                return b""
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return line


def _death(check: str, process: subprocess.Popen, log: IO[str], hung_seconds: float | None) -> Finding:
    """The fault of a check whose process died, or hangs: what it wrote last says why."""
    if hung_seconds is not None:
        process.send_signal(signal.SIGABRT)
    try:
        code = process.wait(timeout=_SECONDS_TO_DIE)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    log.seek(0)
    written = [line.strip() for line in log.read().splitlines() if line.strip()]
    if hung_seconds is not None:
        # The innermost place first, as faulthandler prints it.
        places = [line for line in written if line.startswith("File ")]
        text = f"no answer within {hung_seconds:.0f} s, in {places[0] if places else 'a library'}"
        return Finding(check, Status.FAULT, text, _ADVICE)
    if code < 0:
        text = f"the process was killed by {signal.Signals(-code).name}"
        return Finding(check, Status.FAULT, f"{text}: {written[-1][:_MOST_CHARS]}" if written else text, _ADVICE)
    text = written[-1][:_MOST_CHARS] if written else f"the process ended with exit code {code}"
    return Finding(check, Status.FAULT, text, _ADVICE)
