"""Records the L2 norms of gradients and weights by group of parameters, exact in every layout.

A group is a kind of parameter in one layer, or outside the layers. Every rank adds up the squares of what it alone
keeps, or is the one to count: the optimizer's parts of the whole gradients and of the masters. One sum over all ranks
makes norms of it. Must not know optimizers or when it is time to record.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from transformer_engine.pytorch.optimizers import multi_tensor_applier, multi_tensor_l2norm

from megatron_fp8.checkpoint.contents import ModelPlaces
from megatron_fp8.monitors.protocol import Event, Monitor
from megatron_fp8.optim.state import MASTER, StatePart, state_parts
from megatron_fp8.report.record import Value

GRADIENTS, WEIGHTS = "grad-norm", "params-norm"
_OF_A_LAYER = ("qkv", "proj", "fc1", "fc2", "norms")
_OUTSIDE = ("embedding", "norms", "head")
# The first part of a parameter's name that is found in it says its kind.
_KINDS = (
    ("layer_norm_", "norms"),
    ("_norm.", "norms"),
    ("_layernorm.", "norms"),
    ("embedding.", "embedding"),
    ("output_layer.", "head"),
    ("layernorm_qkv.", "qkv"),
    ("self_attention.qkv.", "qkv"),
    ("softmax_offset", "qkv"),
    ("self_attention.proj.", "proj"),
    (".fc1", "fc1"),
    (".fc2", "fc2"),
)


@dataclass(frozen=True)
class Group:
    """Parameters of one kind; `layer` None: outside the layers. A tied weight counts as the embedding."""

    kind: str
    layer: int | None

    @classmethod
    def of(cls, name: str) -> Group:
        """That of the parameter with this global name. Raises KeyError for a name of no known kind."""
        for fragment, kind in _KINDS:
            if fragment in name:
                parts = name.split(".")
                return cls(kind, int(parts[1]) if parts[0] == "layers" else None)
        raise KeyError(f"parameter {name!r} is of no known kind; add it to megatron_fp8/monitors/norms.py")


class NormMonitor(Monitor):
    """Records a run's norms every `interval` steps."""

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        places: ModelPlaces,
        num_layers: int,
        device: torch.device,
        interval: int,
    ) -> None:
        self._optimizer = optimizer
        self._places = places
        self._device = device
        self._interval = interval
        # The same on every rank, so that what ranks sum lies in the same places.
        self._groups = [Group(kind, layer) for layer in range(num_layers) for kind in _OF_A_LAYER]
        self._groups += [Group(kind, None) for kind in _OUTSIDE]
        self._index = {group: index for index, group in enumerate(self._groups)}
        # Norms of `_parts`.
        self._gradients: Tensor | None = None

    def before_update(self, iteration: int) -> None:
        """Measure the gradients, when it is time."""
        if iteration % self._interval == 0:
            self._measure_gradients()

    def after_step(self, iteration: int, updated: bool) -> Iterator[Event]:
        """The step's gradients, if they were measured, and the weights after it; collective over all ranks.

        Nothing of a step that changed no weights because of its gradients.
        """
        gradients, self._gradients = self._gradients, None
        if gradients is None or not updated:
            return
        parts = list(self._parts())
        weights = self._norms(part.read(MASTER) for part in parts)
        squares = (self._by_group(parts, [norm**2 for norm in norms.tolist()]) for norms in (gradients, weights))
        elements = self._by_group(parts, [part.stop - part.start for part in parts])
        sums = torch.tensor([*squares, elements], dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(sums)
        grad_squares, weight_squares, counts = sums.tolist()
        exists = [count > 0 for count in counts]
        yield (
            "norms",
            {
                "iteration": iteration,
                **self._series(GRADIENTS, grad_squares, exists),
                WEIGHTS: math.sqrt(sum(weight_squares)),
                **self._series(WEIGHTS, weight_squares, exists),
            },
        )

    @torch.no_grad()
    def _measure_gradients(self) -> None:
        # They still hold the loss scale.
        scale = self._optimizer.get_loss_scale().to(self._device)
        self._gradients = self._norms(_gradient(part) for part in self._parts()) / scale

    def _parts(self) -> Iterator[StatePart]:
        """What this rank is to count: no copies of what another rank counts."""
        for part in state_parts(self._optimizer):
            if self._places.state_is_mine(part.parameter):
                yield part

    def _norms(self, tensors: Iterable[Tensor]) -> Tensor:
        """The L2 norm of each of `tensors`, FP32, as Megatron computes the global one; nobody waits for the device.

        One after the other: masters that are kept in a smaller format exist in FP32 one at a time.
        """
        overflow = torch.zeros(1, dtype=torch.int, device=self._device)
        norms = [multi_tensor_applier(multi_tensor_l2norm, overflow, [[tensor]], False)[0] for tensor in tensors]
        return torch.cat([torch.zeros(0, device=self._device), *norms])

    def _by_group(self, parts: Sequence[StatePart], values: Sequence[float]) -> list[float]:
        """Sums of the parts' `values`. On the host, where they are always added in the same order."""
        sums = [0.0] * len(self._groups)
        for part, value in zip(parts, values, strict=True):
            sums[self._index[Group.of(self._places.names[part.parameter])]] += value
        return sums

    def _series(self, name: str, squares: list[float], exists: list[bool]) -> dict[str, Value]:
        """Norms by kind over the whole model, and by layer and kind."""
        of_kind: dict[str, float] = {}
        of_layer: dict[str, Value] = {}
        for group, square, there in zip(self._groups, squares, exists, strict=True):
            if there:
                of_kind[group.kind] = of_kind.get(group.kind, 0.0) + square
                if group.layer is not None:
                    of_layer[f"{name}/layers.{group.layer}/{group.kind}"] = math.sqrt(square)
        return {**{f"{name}/{kind}": math.sqrt(square) for kind, square in of_kind.items()}, **of_layer}


def _gradient(part: StatePart) -> Tensor:
    """Of the part's elements; the other elements of the same buffer are no sums over all ranks."""
    whole: Tensor = part.parameter.main_grad  # type: ignore[attr-defined]
    return whole.view(-1)[part.start : part.stop]
