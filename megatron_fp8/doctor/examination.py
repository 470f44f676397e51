"""Runs the doctor's checks, each in its own process with a time limit, on one rank or on all ranks at once.

A process that dies or hangs is a fault of its check alone. Must not know what checks look at.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from typing import IO, Any

from megatron_fp8.doctor.finding import Finding, HostContext, Status, child_environment
from megatron_fp8.doctor.host_checks import gpu_nodes
from megatron_fp8.doctor.rank_checks import same_versions

# Checks of a single process: name to module and function.
ALONE = {
    "python": "package_checks.python",
    "packages": "package_checks.packages",
    "driver": "host_checks.driver",
    "shared memory": "host_checks.shared_memory",
    "run root": "host_checks.disk",
    "home": "host_checks.home",
    "limits": "host_checks.limits",
    "wandb": "package_checks.wandb",
    "data helper": "library_checks.data_helper",
    "torch": "library_checks.torch_and_device",
    "transformer engine": "library_checks.transformer_engine",
    "cuda libraries": "library_checks.cuda_libraries",
    "fp8": "library_checks.fp8",
    "fused kernels": "library_checks.fused_kernels",
    "megatron core": "library_checks.megatron_core",
    "apex": "library_checks.apex",
}
# Checks that all ranks run at once, connected to each other.
TOGETHER = {
    "gloo": "rank_checks.gloo",
    "nccl": "rank_checks.device_collectives",
    "shared files": "rank_checks.shared_files",
}
# Derived from the findings of all ranks.
SAME_VERSIONS = "same versions"
GATHER = "rank_checks.gather"
ORDER = (*ALONE, *TOGETHER, SAME_VERSIONS)
NEEDS = {
    "transformer engine": "torch",
    "cuda libraries": "transformer engine",
    "fp8": "transformer engine",
    "fused kernels": "transformer engine",
    "megatron core": "transformer engine",
    "apex": "torch",
    "gloo": "torch",
    "nccl": "gloo",
    "shared files": "gloo",
}


def run_check(check: str, context: HostContext) -> Finding:
    """Import a check and call it."""
    finding = call({**ALONE, **TOGETHER}[check], context)
    assert isinstance(finding, Finding)
    return finding


def call(place: str, context: HostContext) -> Any:
    """Call the function at `place`, as in `host_checks.driver`."""
    module, _, function = place.partition(".")
    return getattr(import_module(f"megatron_fp8.doctor.{module}"), function)(context)


_ADVICE = "install the versions of the image (docker/), or of locks/"
_MOST_CHARS = 400
_SECONDS_TO_DIE = 20.0
# Importing torch takes a core for seconds and up to 1 GB, and each rank of a node starts this many processes.
_PROCESSES_AT_ONCE = 4
# On a machine without GPUs: enough for a collective.
_LOCAL_RANKS_WITHOUT_GPUS = 2
# Trivial on a single node.
_OF_SEVERAL_MACHINES = ("shared files", SAME_VERSIONS)


@dataclass(frozen=True)
class DoctorOptions:
    """What to examine. `launched`: by torchrun; otherwise the doctor starts ranks itself."""

    context: HostContext
    launched: bool
    seconds_per_check: float


def examine(options: DoctorOptions) -> list[list[Finding]]:
    """Findings by rank; of this rank alone if the ranks could not connect."""
    mine = alone(options)
    if any(finding.check == "torch" and finding.status is Status.FAULT for finding in mine):
        text = "skipped: torch has a fault"
        return [[*mine, *(Finding(check, Status.ABSENT, text) for check in (*TOGETHER, SAME_VERSIONS))]]
    if not options.launched:
        return [[*mine, *_of_local_ranks(options)]]
    mine += _all_of(TOGETHER, options.context, options.seconds_per_check)
    context = replace(options.context, findings=tuple(mine))
    gathered = _answer(GATHER, context, options.seconds_per_check)
    if isinstance(gathered, Finding):
        return [[*mine, replace(gathered, check=SAME_VERSIONS)]]
    by_rank = [[Finding.from_json(item) for item in findings] for _, findings in gathered]
    verdict = same_versions([host for host, _ in gathered], by_rank)
    return [[*findings, verdict] for findings in by_rank]


def alone(options: DoctorOptions) -> list[Finding]:
    """This rank's findings of the checks that need no other rank."""
    checks = [check for check in ALONE if check != "wandb" or options.context.rank == 0]
    return _all_of(checks, options.context, options.seconds_per_check)


def _all_of(checks: Collection[str], context: HostContext, seconds: float, local: bool = False) -> list[Finding]:
    """Findings of `checks`, several at a time; a check runs after the one it needs, and is skipped if that failed."""
    found: dict[str, Finding] = {}
    waiting = list(checks)
    with ThreadPoolExecutor(_PROCESSES_AT_ONCE) as pool:
        while waiting:
            ready = [check for check in waiting if NEEDS.get(check) not in waiting]
            waiting = [check for check in waiting if check not in ready]
            told = pool.map(_unless_skipped(found, context, seconds, local), ready)
            found.update(zip(ready, told, strict=True))
    return [found[check] for check in checks]


def _unless_skipped(
    found: dict[str, Finding], context: HostContext, seconds: float, local: bool
) -> Callable[[str], Finding]:
    def look(check: str) -> Finding:
        needed = found.get(NEEDS.get(check, ""))
        if needed is not None and (needed.status is Status.FAULT or needed.text.startswith("skipped")):
            return Finding(check, Status.ABSENT, f"skipped: {needed.check} has a fault")
        answer = _answer(check, context, seconds, local)
        assert isinstance(answer, Finding)
        return answer

    return look


def _of_local_ranks(options: DoctorOptions) -> list[Finding]:
    """Findings of ranks on this machine, one per GPU: rank 0's, and faults of the others."""
    num_ranks = len(gpu_nodes()) or _LOCAL_RANKS_WITHOUT_GPUS
    checks = [check for check in TOGETHER if check not in _OF_SEVERAL_MACHINES]
    with tempfile.TemporaryDirectory(prefix="doctor-") as directory, ThreadPoolExecutor(num_ranks) as pool:
        meeting = replace(options.context, world_size=num_ranks, rendezvous=f"file://{directory}/rendezvous")
        ranks = [replace(meeting, rank=rank) for rank in range(num_ranks)]
        told = pool.map(lambda rank: _all_of(checks, rank, options.seconds_per_check, local=True), ranks)
        found: dict[str, Finding] = {}
        for rank, findings in enumerate(told):
            for finding in findings:
                first = found.setdefault(finding.check, finding)
                if finding.status is Status.FAULT and first.status is not Status.FAULT:
                    found[finding.check] = replace(finding, text=f"rank {rank}: {finding.text}")
    text = "single machine: start the doctor under torchrun to check several"
    return [*found.values(), *(Finding(check, Status.ABSENT, text) for check in _OF_SEVERAL_MACHINES)]


def _answer(check: str, context: HostContext, seconds: float, local: bool = False) -> Finding | list[Any]:
    """Run `check` in its own process; if that dies or hangs, the check has a fault."""
    environment = child_environment(*((context.rank, context.world_size) if local else ()))
    # A process that hangs prints where when it is aborted.
    environment["PYTHONFAULTHANDLER"] = "1"
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        tempfile.TemporaryFile("w+", encoding="utf-8") as answer,
        subprocess.Popen(
            [sys.executable, "-m", "megatron_fp8.doctor.worker", str(answer.fileno()), check],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[answer.fileno()],
            text=True,
        ) as process,
    ):
        try:
            process.communicate(json.dumps(context.as_json()) + "\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            return _death(check, process, log, hung_seconds=seconds)
        finally:
            process.kill()
        answer.seek(0)
        told = answer.read()
        if process.returncode or not told:
            return _death(check, process, log, hung_seconds=None)
    data = json.loads(told)
    return data if isinstance(data, list) else Finding.from_json(data)


def _death(check: str, process: subprocess.Popen[str], log: IO[str], hung_seconds: float | None) -> Finding:
    """The fault of a check whose process died or hangs, with the last line it wrote."""
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
