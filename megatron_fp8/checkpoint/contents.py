"""Owns what a checkpoint holds, as named tensors of the whole model and this rank's boxes of them.

Every name is free of the layout: `master.<parameter>`, `exp_avg.<parameter>`, `exp_avg_sq.<parameter>` in FP32,
`precision.<name>` (FP8 scaling state), `rng.<stream>@<coordinates>`; numbers are in the manifest. The model's own
weights are not there: they are the masters, rounded. Must not know files.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn
from transformer_engine.pytorch import Float8Quantizer, Float8Tensor

from megatron_fp8.checkpoint.pieces import NewPiece
from megatron_fp8.checkpoint.placement import Box, Placement, whole_box
from megatron_fp8.config.layout import Layout
from megatron_fp8.model.build import global_parameters
from megatron_fp8.model.sharding import parameter_sharding
from megatron_fp8.optim.state import StatePart, state_parts
from megatron_fp8.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class Content:
    """What this rank holds of the tensor `key` of a checkpoint, whose shape is `whole_shape`.

    `boxes` count the elements of a flat shard, of which `read` gives those from number `first` on: the live tensor, or
    where that is kept in another format a copy in FP32, which is made at each call and is to be dropped before the next
    one is asked for. `is_mine`: this rank writes them; others that hold the same do not.
    """

    key: str
    whole_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    first: int
    read: Callable[[], Tensor]
    is_mine: bool

    def pieces(self) -> Iterator[NewPiece]:
        """The boxes as copies on the host, each made when it is asked for."""
        if not self.boxes:
            return
        values = self.read()
        for box in self.boxes:
            # Ordinary memory, not pinned: what a forked process sees of that is the driver's to say.
            host = torch.empty(box.shape, dtype=values.dtype, device="cpu")
            host.copy_(values[box.start - self.first : box.stop - self.first].view(box.shape))
            yield NewPiece(self.key, self.whole_shape, box.offset, host)


@dataclass(frozen=True)
class ModelPlaces:
    """Where this rank's parameters lie in the whole model's: global names, and placements by parameter."""

    names: Mapping[nn.Parameter, str]
    placements: Mapping[nn.Parameter, Placement]
    groups: ParallelGroups
    distributed_optimizer: bool

    def state_is_mine(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the one that counts, and writes, what it keeps of a parameter's optimizer state."""
        return self.is_first_copy(parameter, in_dp=not self.distributed_optimizer)

    def is_first_copy(self, parameter: nn.Parameter, in_dp: bool) -> bool:
        """Whether no rank before this one holds the same of a parameter: on another stage, in its tensor-parallel and,
        with `in_dp`, in its data-parallel group."""
        divided = self.placements[parameter].sharding.axis is not None
        # The last stage's copy of a tied embedding has the first one's name.
        tied = self.names[parameter].startswith("embedding.") and not self.groups.is_first_stage
        first_in_tp = divided or self.groups.tp.rank() == 0
        return not tied and first_in_tp and (not in_dp or self.groups.dp.rank() == 0)


def model_places(
    chunks: Sequence[DistributedDataParallel],
    layout: Layout,
    activation: str,
    groups: ParallelGroups,
    distributed: bool,
) -> ModelPlaces:
    """The places of every parameter of this rank's chunks."""
    names, placements = {}, {}
    for name, parameter in global_parameters(chunks):
        sharding = parameter_sharding(name, activation)
        names[parameter] = name
        placements[parameter] = Placement(
            sharding,
            tuple(parameter.shape),
            groups.tp.rank(),
            groups.tp.size(),
            layout.vocab_size if sharding.is_padded_vocab else None,
        )
    return ModelPlaces(names, placements, groups, distributed)


def optimizer_tensors(
    optimizer: MegatronOptimizer, places: ModelPlaces, names: Sequence[str] | None = None
) -> Iterator[tuple[StatePart, str, Content]]:
    """(part, state name, content) of all that this rank keeps of the optimizer.

    `names`: of the states; None: those that are needed to go on exactly.
    """
    for part in state_parts(optimizer):
        is_mine = places.state_is_mine(part.parameter)
        for name in part.names if names is None else names:
            key = f"{name}.{places.names[part.parameter]}"
            yield (
                part,
                name,
                _cut(key, part.parameter, part.start, part.stop, partial(part.read, name), places, is_mine),
            )


def fp8_weight_tensors(places: ModelPlaces) -> Iterator[tuple[Float8Tensor, Content, Content]]:
    """(weight, its bytes, its inverse scale) of every weight that lives in FP8 with delayed scaling.

    The masters do not say what these bytes are: they were cast with a scale that has been replaced since.
    """
    for parameter, name in places.names.items():
        if isinstance(parameter, Float8Tensor) and isinstance(parameter._quantizer, Float8Quantizer):
            # Whatever the optimizer divides, every data-parallel rank has the whole bytes, and every rank the scale.
            is_mine = places.is_first_copy(parameter, in_dp=True)
            flat = parameter._data.view(-1)
            content = _cut(f"fp8_weights.{name}", parameter, 0, flat.numel(), partial(_same, flat), places, is_mine)
            scale_is_mine = is_mine and places.groups.tp.rank() == 0
            yield parameter, content, whole_content(f"fp8_weight_scales.{name}", parameter._scale_inv, scale_is_mine)


def whole_content(key: str, tensor: Tensor, is_mine: bool) -> Content:
    """A tensor that one rank writes whole; a number becomes a tensor of shape `[1]`."""
    tensor = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    shape = tuple(tensor.shape)
    return Content(key, shape, (whole_box(shape),), 0, partial(_same, tensor.reshape(-1)), is_mine)


def _cut(
    key: str,
    parameter: nn.Parameter,
    start: int,
    stop: int,
    read: Callable[[], Tensor],
    places: ModelPlaces,
    is_mine: bool,
) -> Content:
    """The elements `start` to `stop` of the parameter's flat shard, which `read` gives."""
    placement = places.placements[parameter]
    return Content(key, placement.whole_shape, tuple(placement.boxes(start, stop)), start, read, is_mine)


def _same(tensor: Tensor) -> Tensor:
    return tensor
