"""Owns what the benchmark compares: its subjects, the pairs whose ratio is reported, the targets. Imports no torch.

A subject is one program in processes of its own; it knows nothing of the others. Must not know how one is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
