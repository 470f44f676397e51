"""A finished comparison: every run, and what may be said about their losses. Imports no torch.

The number of a run is the mean of its last K losses. Runs of one seed share weights and samples, so a mode's number is
compared with the reference's *at the same seed*: what the seed does to both cancels. The seed-to-seed spread is the
standard deviation (n - 1) of the reference's numbers over the seeds, which differ in weights and in samples: how far
two equally good runs lie apart that nobody would call different.

What few seeds cannot say:
- With 3 seeds the true spread lies between 0.5 and 6 times the estimate (95 %, chi-square with 2 degrees of freedom).
- Three differences of one sign happen by chance in a quarter of all cases. So lowest and highest difference are given,
  and no significance.
- Rounding alone makes two runs drift apart: a difference like that between BF16 and FP32 is what to expect of any
  change of the order of sums. Only differences well above that one say something about a format.
- Short runs say nothing about what appears after thousands of steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import versions
from megatron_fp8.config.schema import Config

LINEARS = ("qkv", "proj", "fc1", "fc2")
KINDS = ("input", "weight", "grad_output")
OPERANDS = tuple(f"{linear}/{kind}" for linear in LINEARS for kind in KINDS)
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "torchao")


@dataclass(frozen=True)
class RunTask:
    """One mode at one seed. `overrides`: everything that changes the config file, mode and seed among them.

    `samples`: file of the seed's samples.
    """

    mode: str
    seed: int
    config: Path
    overrides: tuple[str, ...]
    samples: Path
    num_threads: int


@dataclass(frozen=True)
class Failure:
    """A process that gave no result because of a mistake in config or data, which `text` explains."""

    text: str


@dataclass(frozen=True)
class OperandNoise:
    """What quantization did to one GEMM operand in the last step.

    `sqnr_db`: signal to quantization noise in dB, 20 log10(||x|| / ||x - q(x)||), of the tensor as its first GEMM
    reads it (input and weight: forward; output gradient: input gradient). `clipped`: share of elements beyond the
    format's largest number; `flushed`: share of the non-zero elements that became 0.
    """

    sqnr_db: float
    clipped: float
    flushed: float


@dataclass(frozen=True)
class RunResult:
    """What one run did.

    `losses`: nats per token before each step. `skipped`: numbers of steps, from 0, that changed no weights (overflow
    under FP16's loss scale). `operands`: by layer, linear layer and kind, as in `layers.0/fc1/input`; empty where
    nothing was quantized.
    """

    mode: str
    seed: int
    losses: list[float]
    skipped: list[int]
    operands: Mapping[str, OperandNoise]
    num_parameters: int
    seconds: float


@dataclass(frozen=True)
class Difference:
    """A mode's loss less the reference's at each seed, in nats per token; `spread`: None for a single seed."""

    mode: str
    reference: str
    by_seed: Mapping[int, float]
    spread: float | None

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.by_seed.values())

    @property
    def lowest(self) -> float:
        """The smallest of the seeds' differences; NaN if one is."""
        return math.nan if math.isnan(self.mean) else min(self.by_seed.values())

    @property
    def highest(self) -> float:
        """The largest of the seeds' differences; NaN if one is."""
        return math.nan if math.isnan(self.mean) else max(self.by_seed.values())

    @property
    def is_larger_than_spread(self) -> bool | None:
        """Whether the mean difference is; None where one of the two is unknown."""
        if self.spread is None or math.isnan(self.spread):
            return None
        return not abs(self.mean) <= self.spread

    @property
    def verdict(self) -> str:
        """A sentence."""
        start = f"{self.mode} differs from {self.reference} by {self.mean:+.4f} nats"
        if not math.isfinite(self.mean):
            return f"{self.mode} has diverged: a loss is not finite"
        if self.spread is None:
            return f"{start}; one seed has no spread"
        if math.isnan(self.spread):
            return f"{start}; {self.reference} has diverged, so there is no spread"
        if not self.is_larger_than_spread:
            return f"{start}, within the seed-to-seed spread {self.spread:.4f}"
        signs = {math.copysign(1, value) for value in self.by_seed.values()}
        always = len(signs) == 1 and min(abs(value) for value in self.by_seed.values()) > self.spread
        return (
            f"{start}, larger than the seed-to-seed spread {self.spread:.4f}"
            f"{'' if always else ' on average, not'} at every seed"
        )


def last_mean(losses: Sequence[float], num_last: int) -> float:
    """The number of a run; NaN when one of the losses is not finite."""
    mean = statistics.fmean(losses[-num_last:])
    return mean if math.isfinite(mean) else math.nan


def seed_spread(numbers: Mapping[int, float]) -> float | None:
    """Standard deviation over the seeds; None for a single one, NaN when a number is."""
    if len(numbers) < 2:
        return None
    if any(math.isnan(number) for number in numbers.values()):
        return math.nan
    return statistics.stdev(numbers.values())


def difference(
    mode: str, numbers: Mapping[int, float], reference: str, reference_numbers: Mapping[int, float]
) -> Difference:
    """Of a mode to the reference, by seed; both must have the same seeds."""
    if numbers.keys() != reference_numbers.keys():
        raise ValueError(f"{mode} has the seeds {list(numbers)}, {reference} {list(reference_numbers)}")
    by_seed = {seed: numbers[seed] - reference_numbers[seed] for seed in numbers}
    return Difference(mode, reference, by_seed, seed_spread(reference_numbers))


@dataclass(frozen=True)
class Comparison:
    """The runs that ended well, by mode and seed; modes of which a run failed are not among them.

    `num_last`: steps at the end whose mean loss is compared. `reference`: a mode, which may be missing.
    """

    config: Config
    device: str
    reference: str
    num_last: int
    num_threads: int
    runs: Mapping[str, Mapping[int, RunResult]]

    def numbers(self, mode: str) -> dict[int, float]:
        """Mean of the last losses by seed, nats per token."""
        return {seed: last_mean(run.losses, self.num_last) for seed, run in self.runs[mode].items()}

    def differences(self) -> dict[str, Difference]:
        """Every other mode's difference to the reference; empty where the reference failed."""
        if self.reference not in self.runs:
            return {}
        reference = self.numbers(self.reference)
        return {
            mode: difference(mode, self.numbers(mode), self.reference, reference)
            for mode in self.runs
            if mode != self.reference
        }

    def spread(self) -> float | None:
        """The reference's seed-to-seed spread."""
        return seed_spread(self.numbers(self.reference)) if self.reference in self.runs else None

    def operand_sqnr(self, mode: str) -> dict[str, float]:
        """dB by operand (`fc1/input`), mean over layers and seeds; empty for what is not quantized."""
        found: dict[str, list[float]] = {}
        for run in self.runs[mode].values():
            for name, noise in run.operands.items():
                found.setdefault(name.split("/", 1)[1], []).append(noise.sqnr_db)
        return {name: statistics.fmean(found[name]) for name in OPERANDS if name in found}

    def as_json(self) -> dict[str, Any]:
        """Everything; numbers that are not finite as texts, which JSON has."""
        differences = {
            mode: {
                **asdict(found),
                "mean": found.mean,
                "lowest": found.lowest,
                "highest": found.highest,
                "is_larger_than_spread": found.is_larger_than_spread,
                "verdict": found.verdict,
            }
            for mode, found in self.differences().items()
        }
        everything = {
            "device": self.device,
            "versions": versions(_PACKAGES),
            "config": self.config.model_dump(mode="json"),
            "num_threads": self.num_threads,
            "reference": self.reference,
            "num_last": self.num_last,
            "seed_to_seed_spread": self.spread(),
            "differences": differences,
            "sqnr_db": {mode: self.operand_sqnr(mode) for mode in self.runs},
            "runs": [asdict(run) for by_seed in self.runs.values() for run in by_seed.values()],
        }
        plain: dict[str, Any] = _finite_or_text(everything)
        return plain


def collect(
    results: Sequence[RunResult], modes: Sequence[str], seeds: Sequence[int]
) -> dict[str, dict[int, RunResult]]:
    """Results by mode and seed, in the given order, of the modes that have one for every seed."""
    found = {(result.mode, result.seed): result for result in results}
    return {
        mode: {seed: found[mode, seed] for seed in seeds}
        for mode in modes
        if all((mode, seed) in found for seed in seeds)
    }


def _finite_or_text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite_or_text(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_or_text(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
