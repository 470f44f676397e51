"""What the benchmark compares, and what it found: subjects, samples, their medians, ratios taken round by round.

A subject is one program in processes of its own. A ratio is taken within each round, where both subjects met the same
machine, and the median of these is reported. Imports no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

MODES = ("fp32", "bf16", "fp8", "dp")
# Data parallelism is measured in this precision.
_DP_PRECISION = "bf16"

Implementation = Literal["ours", "plain", "gemm"]


@dataclass(frozen=True)
class Subject:
    """One program to measure.

    `implementation`: `ours` (the project's own training step), `plain` (plain PyTorch) or `gemm` (only the GEMMs of
    the model's linear layers). `num_processes`: data-parallel ranks. `num_threads`: threads of each.
    """

    name: str
    implementation: Implementation
    precision: str
    num_processes: int
    num_threads: int


@dataclass(frozen=True)
class Comparison:
    """Ratio of two subjects' tokens per second, and the least that it should be (None: for information)."""

    faster: str
    slower: str
    target: float | None


@dataclass(frozen=True)
class Plan:
    """Everything that one interleaved run measures."""

    subjects: tuple[Subject, ...]
    comparisons: tuple[Comparison, ...]


def make_plan(modes: Sequence[str], num_threads: int) -> Plan:
    """The subjects and comparisons of `modes`, members of `MODES`; `num_threads` for those of one process."""
    subjects: dict[str, Subject] = {}
    comparisons: list[Comparison] = []

    def subject(implementation: Implementation, precision: str) -> str:
        name = f"{implementation} {precision}"
        subjects[name] = Subject(name, implementation, precision, 1, num_threads)
        return name

    for precision in ("fp32", "bf16"):
        if precision in modes:
            plain, ours = subject("plain", precision), subject("ours", precision)
            comparisons.append(Comparison(ours, plain, 1.0))
            subject("gemm", precision)
    if "bf16" in modes and "fp32" in modes:
        # Where the CPU has no BF16 arithmetic, plain FP32 is what a user would really run.
        comparisons.append(Comparison("ours bf16", "plain fp32", None))
    if "fp8" in modes:
        bf16, fp8 = subject("ours", "bf16"), subject("ours", "fp8")
        comparisons.append(Comparison(fp8, bf16, 0.75))
        subject("gemm", "fp32")
    if "dp" in modes:
        one = Subject(f"ours {_DP_PRECISION}, 1 thread", "ours", _DP_PRECISION, 1, 1)
        two = Subject(f"ours {_DP_PRECISION}, dp 2 x 1 thread", "ours", _DP_PRECISION, 2, 1)
        subjects |= {one.name: one, two.name: two}
        comparisons.append(Comparison(two.name, one.name, 1.6))
    return Plan(tuple(subjects.values()), tuple(comparisons))


@dataclass(frozen=True)
class Sample:
    """One measured step of a subject over all its ranks.

    `seconds`: of the slowest rank. `loss`: nats per token before the step. `cpu_seconds`: of all ranks and threads.
    `other_cpus`: CPUs that were busy meanwhile with anything else, on average.
    """

    seconds: float
    num_tokens: int
    loss: float | None
    cpu_seconds: float
    other_cpus: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the wall time."""
        return self.num_tokens / self.seconds

    @property
    def tokens_per_cpu_second(self) -> float:
        """Tokens over the CPU time of all ranks and threads: hardly moved by what else the machine does."""
        return self.num_tokens / self.cpu_seconds


@dataclass(frozen=True)
class Cost:
    """One kind of operation in one step: seconds without what it calls, over all its calls."""

    name: str
    seconds: float
    num_calls: int


@dataclass
class SubjectResult:
    """All that was measured of one subject.

    `start_seconds`: processes started until the model stood. `first_step_seconds`: of the step before the rounds.
    `rounds`: one sample for each round. `is_short`: too slow for a whole step, so `rounds` is one small piece.
    `peak_memory_bytes`: of the rank that held most. `num_parameters`: of the whole model. `costs`: of one profiled
    step, largest first; empty without a profile.
    """

    subject: Subject
    start_seconds: float
    num_parameters: int | None
    first_step_seconds: float = 0.0
    first_loss: float | None = None
    rounds: list[Sample] = field(default_factory=list)
    is_short: bool = False
    peak_memory_bytes: int = 0
    costs: list[Cost] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Median over the rounds."""
        return statistics.median(sample.tokens_per_second for sample in self.rounds)

    @property
    def other_cpus(self) -> float:
        """Median over the rounds."""
        return statistics.median(sample.other_cpus for sample in self.rounds)


@dataclass(frozen=True)
class Ratio:
    """Tokens per second of one subject over another's: the median of the rounds' ratios, and their range.

    `by_cpu_time`: the median ratio of tokens per CPU second. With one thread each it says the same as `median` on a
    quiet machine, and still does on a busy one; threads that wait for each other may count as busy.
    """

    comparison: Comparison
    median: float
    lowest: float
    highest: float
    by_cpu_time: float

    @property
    def is_reached(self) -> bool | None:
        """Whether the target is; None without one."""
        return None if self.comparison.target is None else self.median >= self.comparison.target


def ratio(comparison: Comparison, results: Sequence[SubjectResult]) -> Ratio:
    """The comparison's ratio. Against a subject that was measured only in short, its one sample stands for all."""
    by_name = {result.subject.name: result for result in results}
    faster, slower = by_name[comparison.faster], by_name[comparison.slower]
    num_rounds = max(len(faster.rounds), len(slower.rounds))
    pairs = list(zip(_samples(faster, num_rounds), _samples(slower, num_rounds), strict=True))
    ratios = [one.tokens_per_second / other.tokens_per_second for one, other in pairs]
    by_cpu_time = statistics.median(one.tokens_per_cpu_second / other.tokens_per_cpu_second for one, other in pairs)
    return Ratio(comparison, statistics.median(ratios), min(ratios), max(ratios), by_cpu_time)


def _samples(result: SubjectResult, num_rounds: int) -> list[Sample]:
    return result.rounds * num_rounds if result.is_short else result.rounds


def ceiling(results: Sequence[SubjectResult], subject: Subject) -> float | None:
    """Tokens per second of `subject` if a step were its GEMMs only, at the best rate that this machine has for them.

    BF16 and FP8 products are exact in FP32, so the faster of the two rates counts there. None for the GEMMs
    themselves, and where they were not measured with as many threads in all.
    """
    if subject.implementation == "gemm":
        return None
    usable = ("fp32",) if subject.precision == "fp32" else ("fp32", "bf16")
    rates = [
        result.tokens_per_second
        for result in results
        if result.subject.implementation == "gemm"
        and result.subject.precision in usable
        and result.subject.num_threads == subject.num_processes * subject.num_threads
    ]
    return max(rates, default=None)


@dataclass(frozen=True)
class CheckpointCost:
    """Medians over the rounds, in seconds; bytes of the state; memory beyond that before the save, in bytes.

    `hold_up`: how long training waits for a save in the background. `save`, `load`: a whole one. `torch_save`,
    `torch_load`: the same tensors in one file. `write`: as many bytes, as fast as the disk takes them.
    """

    state_bytes: int
    hold_up: float
    save: float
    torch_save: float
    write: float
    load: float
    torch_load: float
    extra_bytes: int
