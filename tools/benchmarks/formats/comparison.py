"""Owns a finished comparison: every run, and what is derived from them. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.formats.difference import Difference, difference, last_mean, seed_spread
from benchmarks.formats.work import KINDS, LINEARS, RunResult
from megatron_fp8.config.schema import Config

OPERANDS = tuple(f"{linear}/{kind}" for linear in LINEARS for kind in KINDS)
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "torchao")


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
            "versions": {"python": platform.python_version(), **_versions()},
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


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _finite_or_text(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite_or_text(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_or_text(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
