"""The order of measuring: all subjects stand ready in processes of their own, one at a time makes a step.

Short turns in one run, and ratios within a round: what else the machine does meets all subjects alike. Every other
round goes backwards, so that a drift cancels. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import Job, JobError
from benchmarks.speed.measurement import Cost, Sample, Subject, SubjectResult

Say = Callable[[str], None]


@dataclass(frozen=True)
class Procedure:
    """How to measure: the work (`config` and `overrides`, `tokens_per_step` of it), how often, and what is too slow.

    A subject whose step would take longer than `slow_step_seconds` is measured once, on a small piece of a step.
    """

    config: Path
    overrides: tuple[str, ...]
    tokens_per_step: int
    num_rounds: int
    slow_step_seconds: float
    start_timeout_seconds: float
    with_profiles: bool


class SubjectError(RuntimeError):
    """A measured process ended or did not start; the text has the end of its log."""


class _Station:
    """A subject's processes, up and waiting, and what was measured of them so far. Raises SubjectError."""

    def __init__(self, subject: Subject, procedure: Procedure, stack: ExitStack) -> None:
        overrides = [*procedure.overrides, f"precision.mode={subject.precision}"]
        started = time.perf_counter()
        self._job = stack.enter_context(
            Job(
                "benchmarks.speed.worker:serve",
                subject,
                procedure.config,
                overrides,
                num_ranks=subject.num_processes,
                num_threads=subject.num_threads,
            )
        )
        try:
            num_parameters = self._job.receive(procedure.start_timeout_seconds)[0]
        except JobError as error:
            raise _failure(subject, "while it started", error) from None
        self.result = SubjectResult(subject, time.perf_counter() - started, num_parameters)

    def _ask(self, command: str) -> list[Any]:
        try:
            return self._job.ask(command)
        except JobError as error:
            raise _failure(self.result.subject, f"during {command}", error) from None

    def measure(self, command: str) -> Sample:
        """One turn of the subject."""
        busy_before, started = _busy_cpu_seconds(), time.perf_counter()
        answers = self._ask(command)
        wall, busy = time.perf_counter() - started, _busy_cpu_seconds() - busy_before
        cpu_seconds = sum(answer["cpu_seconds"] for answer in answers)
        peaks = [answer["peak_memory_bytes"] for answer in answers]
        self.result.peak_memory_bytes = max(self.result.peak_memory_bytes, *peaks)
        return Sample(
            seconds=max(answer["seconds"] for answer in answers),
            num_tokens=answers[0]["num_tokens"],
            loss=answers[0]["loss"],
            cpu_seconds=cpu_seconds,
            other_cpus=max(0.0, (busy - cpu_seconds) / wall),
        )

    def warm_up(self, tokens_per_step: int, slow_step_seconds: float) -> None:
        """The first step; of a subject whose steps would take too long, a small piece, which then is its result."""
        least_speed = tokens_per_step / slow_step_seconds
        short = self.measure("short_step")
        if short.tokens_per_second < least_speed:
            # What is done only once, at the start, does not count against it.
            short = self.measure("short_step")
        self.result.is_short = short.tokens_per_second < least_speed
        first = short
        if self.result.is_short:
            self.result.rounds.append(short)
        elif short.num_tokens < tokens_per_step:
            first = self.measure("step")
        self.result.first_step_seconds = first.seconds
        self.result.first_loss = first.loss

    def profile(self) -> None:
        """Keep the costs of one step of the first rank."""
        self.result.costs = [Cost(**cost) for cost in self._ask("profile")[0]]


def run_rounds(subjects: Sequence[Subject], procedure: Procedure, say: Say) -> list[SubjectResult]:
    """Measure every subject; `say` gets a line now and then. Raises SubjectError when a process fails."""
    with ExitStack() as stack:
        # One after the other: they would slow each other's start.
        stations = [_start(subject, procedure, stack, say) for subject in subjects]
        steady = [station for station in stations if not station.result.is_short]
        for number in range(procedure.num_rounds):
            for station in steady if number % 2 == 0 else reversed(steady):
                station.result.rounds.append(station.measure("step"))
            seconds = ", ".join(f"{s.result.subject.name} {s.result.rounds[-1].seconds:.2f}" for s in steady)
            say(f"round {number + 1} of {procedure.num_rounds}, seconds a step: {seconds}")
        if procedure.with_profiles:
            for station in steady:
                if station.result.subject.implementation != "gemm":
                    station.profile()
        return [station.result for station in stations]


def _start(subject: Subject, procedure: Procedure, stack: ExitStack, say: Say) -> _Station:
    station = _Station(subject, procedure, stack)
    station.warm_up(procedure.tokens_per_step, procedure.slow_step_seconds)
    result = station.result
    say(f"{subject.name}: up after {result.start_seconds:.1f} s, first step {result.first_step_seconds:.2f} s")
    return station


def _failure(subject: Subject, when: str, error: JobError) -> SubjectError:
    return SubjectError(f"subject {subject.name!r} {error.what} {when}. The end of its log:\n{error.log}")


def _busy_cpu_seconds() -> float:
    """CPU seconds that all processes of the machine have used, over all CPUs."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0))
