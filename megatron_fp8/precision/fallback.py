"""Decides which layers fall back from FP8 to BF16 and which return, from health checks of their tensors.

Pure logic on numbers that are the same on all ranks, so that all ranks decide the same. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_fp8.precision.policy import COUNTED_LAYERS, COUNTS, FALLBACK_LISTS, FALLEN_BACK, HealthPolicy

if TYPE_CHECKING:
    from megatron_fp8.precision.tensor_health import TensorHealth


@dataclass(frozen=True)
class Excess:
    """A tensor's `clipped`, `flushed` or `error` (`quantity`) over its limit."""

    tensor: str
    quantity: str
    value: float
    limit: float


@dataclass(frozen=True)
class Change:
    """A layer that falls back because of `reason`, the largest excess of its last check, or returns to FP8 (None)."""

    layer: int
    reason: Excess | None


class FallbackDecider:
    """Counts consecutive checks per layer; a layer that a check does not cover keeps its count.

    A layer falls back after `num_checks` consecutive checks over a limit, and returns after `num_healthy_checks`
    consecutive healthy ones (0: never).
    """

    def __init__(self, policy: HealthPolicy) -> None:
        self._policy = policy
        self._consecutive: dict[int, int] = {}
        self._fallen_back: set[int] = set()

    @property
    def fallen_back(self) -> frozenset[int]:
        """Layers that have fallen back to BF16."""
        return frozenset(self._fallen_back)

    def check(self, layers: Mapping[int, Mapping[str, TensorHealth]]) -> list[Change]:
        """Count one check of these layers' tensors; returns what changes, by layer."""
        changes = []
        for layer in sorted(layers):
            reason = worst_excess(layers[layer], self._policy)
            fallen = layer in self._fallen_back
            # Unhealthy checks count towards falling back, healthy ones towards returning to FP8.
            counts = (reason is None) if fallen else (reason is not None)
            self._consecutive[layer] = self._consecutive.get(layer, 0) + 1 if counts else 0
            needed = self._policy.num_healthy_checks if fallen else self._policy.num_checks
            if not needed or self._consecutive[layer] < needed:
                continue
            self._consecutive[layer] = 0
            self._fallen_back.symmetric_difference_update({layer})
            changes.append(Change(layer, None if fallen else reason))
        return changes

    def state_dict(self) -> dict[str, list[int]]:
        """Plain data by `FALLBACK_LISTS`: layers that have fallen back; layers with a count, and their counts."""
        counted = sorted(layer for layer, count in self._consecutive.items() if count)
        return {
            FALLEN_BACK: sorted(self._fallen_back),
            COUNTED_LAYERS: counted,
            COUNTS: [self._consecutive[layer] for layer in counted],
        }

    def load_state_dict(self, saved: Mapping[str, list[int]]) -> None:
        """Load a `state_dict`. Raises ValueError for anything else."""
        if not saved.keys() >= set(FALLBACK_LISTS) or len(saved[COUNTED_LAYERS]) != len(saved[COUNTS]):
            raise ValueError(f"not the state of an FP8 fallback: {dict(saved)}")
        self._fallen_back = set(saved[FALLEN_BACK])
        self._consecutive = dict(zip(saved[COUNTED_LAYERS], saved[COUNTS], strict=True))


def worst_excess(tensors: Mapping[str, TensorHealth], policy: HealthPolicy) -> Excess | None:
    """The largest excess relative to its limit; None if nothing is over. NaN is over every limit."""
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
