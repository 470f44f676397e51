"""Owns the decision which layers leave FP8 for BF16, and which return, from checks of their tensors.

Pure logic over numbers that all ranks have alike, so that all decide alike. Must not know how tensors are measured or
how a layer changes its format. Imports no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_fp8.precision.policy import HealthPolicy
from megatron_fp8.precision.tensor_health import TensorHealth


@dataclass(frozen=True)
class Excess:
    """A number over its limit: of which tensor, which (`clipped`, `flushed` or `error`), and both values."""

    tensor: str
    quantity: str
    value: float
    limit: float


@dataclass(frozen=True)
class Change:
    """A layer that leaves FP8 because of `reason`, the largest excess of its last check, or returns (None)."""

    layer: int
    reason: Excess | None


class FallbackDecider:
    """Counts checks in a row per layer.

    A layer falls back after `num_checks` checks in a row over a limit, and returns after `num_healthy_checks` healthy
    ones in a row (0: never). A layer that a check does not cover keeps its count.
    """

    def __init__(self, policy: HealthPolicy) -> None:
        self._policy = policy
        self._in_a_row: dict[int, int] = {}
        self._fallen_back: set[int] = set()

    @property
    def fallen_back(self) -> frozenset[int]:
        """Layers that run in BF16 by decision."""
        return frozenset(self._fallen_back)

    def check(self, layers: Mapping[int, Mapping[str, TensorHealth]]) -> list[Change]:
        """Take one check of the given layers' tensors; returns what changes, by layer."""
        changes = []
        for layer in sorted(layers):
            reason = worst_excess(layers[layer], self._policy)
            fallen = layer in self._fallen_back
            # Unhealthy checks count towards falling back, healthy ones towards returning.
            counts = (reason is None) if fallen else (reason is not None)
            self._in_a_row[layer] = self._in_a_row.get(layer, 0) + 1 if counts else 0
            needed = self._policy.num_healthy_checks if fallen else self._policy.num_checks
            if not needed or self._in_a_row[layer] < needed:
                continue
            self._in_a_row[layer] = 0
            self._fallen_back.symmetric_difference_update({layer})
            changes.append(Change(layer, None if fallen else reason))
        return changes

    def state_dict(self) -> dict[str, list[int]]:
        """Plain data: fallen-back layers, and the layers that have a count with their counts."""
        counted = sorted(layer for layer, count in self._in_a_row.items() if count)
        return {
            "fallen_back": sorted(self._fallen_back),
            "counted_layers": counted,
            "counts": [self._in_a_row[layer] for layer in counted],
        }

    def load_state_dict(self, saved: Mapping[str, list[int]]) -> None:
        """Take over a `state_dict`. Raises ValueError when it is not one."""
        missing = {"fallen_back", "counted_layers", "counts"} - set(saved)
        if missing or len(saved["counted_layers"]) != len(saved["counts"]):
            raise ValueError(f"not the state of an FP8 fallback: {dict(saved)}")
        self._fallen_back = set(saved["fallen_back"])
        self._in_a_row = dict(zip(saved["counted_layers"], saved["counts"], strict=True))


def worst_excess(tensors: Mapping[str, TensorHealth], policy: HealthPolicy) -> Excess | None:
    """The number that is the most times its limit; None if none is over. NaN is over every limit."""
    found = []
    for name, health in tensors.items():
        for quantity, value, limit in (
            ("clipped", health.clipped, policy.max_clipped),
            ("flushed", health.flushed, policy.max_flushed),
            ("error", health.error, policy.max_error),
        ):
            if not value <= limit:
                times = math.inf if math.isnan(value) or limit == 0 else value / limit
                found.append((times, Excess(name, quantity, value, limit)))
    return max(found, key=lambda pair: pair[0])[1] if found else None
