"""Lists what a checkpoint holds: named tensors of the whole model, and this rank's boxes of them.

Names do not depend on the layout (`plain_index`): `master.<parameter>`, `exp_avg.<parameter>`, `exp_avg_sq.<parameter>`
in FP32, `precision.<name>` (FP8 scaling state), `rng.<stream>@<coordinates>`. Numbers are in the manifest. The model's
weights are not saved: they are the master weights, rounded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn
from transformer_engine.pytorch import Float8Quantizer, Float8Tensor

from megatron_fp8.checkpoint.placement import Box, Placement, whole_box
from megatron_fp8.checkpoint.plain_index import FP8_WEIGHT, FP8_WEIGHT_SCALE
from megatron_fp8.checkpoint.tensor_files import NewPiece
from megatron_fp8.config.layout import Layout
from megatron_fp8.model.build import global_parameters
from megatron_fp8.model.sharding import parameter_sharding
from megatron_fp8.optim.state import StatePart, state_parts
from megatron_fp8.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class Content:
    """This rank's share of the tensor `key` of a checkpoint.

    `boxes` count the elements of a flat shard, of which `read` returns those from number `first` on: the live tensor,
    or an FP32 copy if that is kept in another format; drop the copy before asking for the next one. `is_mine`: this
    rank writes the share; other ranks may hold the same.
    """

    key: str
    whole_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    first: int
    read: Callable[[], Tensor]
    is_mine: bool

    def pieces(self) -> Iterator[NewPiece]:
        """Copies of the boxes on the host, each made on demand."""
        if not self.boxes:
            return
        values = self.read()
        for box in self.boxes:
            # Not pinned: what a forked process sees of pinned memory is up to the driver.
            host = torch.empty(box.shape, dtype=values.dtype, device="cpu")
            host.copy_(values[box.start - self.first : box.stop - self.first].view(box.shape))
            yield NewPiece(self.key, self.whole_shape, box.offset, host)


@dataclass(frozen=True)
class ModelPlaces:
    """Global names of this rank's parameters, and their placements in the whole model."""

    names: Mapping[nn.Parameter, str]
    placements: Mapping[nn.Parameter, Placement]
    groups: ParallelGroups
    distributed_optimizer: bool

    def state_is_mine(self, parameter: nn.Parameter) -> bool:
        """Whether this rank is the one that counts and writes its share of a parameter's optimizer state."""
        return self.is_first_copy(parameter, in_dp=not self.distributed_optimizer)

    def is_first_copy(self, parameter: nn.Parameter, in_dp: bool) -> bool:
        """Whether no earlier rank holds the same of a parameter: on another stage, in the tensor-parallel group and,
        with `in_dp`, in the data-parallel group."""
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
    """(part, state name, content) of this rank's optimizer state; `names` None: the states needed to resume exactly."""
    for part in state_parts(optimizer):
        is_mine = places.state_is_mine(part.parameter)
        for name in part.names if names is None else names:
            key = f"{name}.{places.names[part.parameter]}"
            content = _cut(key, part.parameter, part.start, part.stop, partial(part.read, name), places, is_mine)
            yield part, name, content


def fp8_weight_tensors(places: ModelPlaces) -> Iterator[tuple[Float8Tensor, Content, Content]]:
    """(weight, its bytes, its inverse scale) of every weight that lives in FP8 under delayed scaling.

    The master weights do not determine these bytes: they were cast with a scale that has been replaced since.
    """
    for parameter, name in places.names.items():
        if isinstance(parameter, Float8Tensor) and isinstance(parameter._quantizer, Float8Quantizer):
            # Even with a distributed optimizer every data-parallel rank has all bytes, and every rank the scale.
            is_mine = places.is_first_copy(parameter, in_dp=True)
            flat = parameter._data.view(-1)
            content = _cut(FP8_WEIGHT + name, parameter, 0, flat.numel(), partial(_same, flat), places, is_mine)
            scale_is_mine = is_mine and places.groups.tp.rank() == 0
            yield parameter, content, whole_content(FP8_WEIGHT_SCALE + name, parameter._scale_inv, scale_is_mine)


def whole_content(key: str, tensor: Tensor, is_mine: bool) -> Content:
    """A tensor that one rank writes whole; a scalar gets the shape `[1]`."""
    tensor = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    shape = tuple(tensor.shape)
    return Content(key, shape, (whole_box(shape),), 0, partial(_same, tensor.reshape(-1)), is_mine)


def stream_owner(groups: ParallelGroups) -> str:
    """This rank's coordinates, under which its random streams and other own tensors are saved."""
    places = (("tp", groups.tp), ("pp", groups.pp), ("dp", groups.dp))
    return ".".join(f"{name}{group.rank()}of{group.size()}" for name, group in places)


def read_streams(device: torch.device) -> dict[str, Tensor]:
    """States of torch's and Megatron's random generators, uint8 on the CPU; dropout draws from them.

    They belong to a rank's coordinates: under another layout there is no meaningful way to continue them.
    """
    states = {"host": torch.get_rng_state(), "device": torch.get_device_module(device).get_rng_state()}
    for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        states[f"tracker.{name}"] = state
    return {name: state.cpu() for name, state in states.items()}


def write_streams(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore what `read_streams` returned."""
    torch.set_rng_state(states["host"])
    # Checkpoints of earlier versions on CPUs have one stream for both.
    torch.get_device_module(device).set_rng_state(states.get("device", states["host"]))
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states({name: states[f"tracker.{name}"] for name in tracker.get_states()})


def _cut(
    key: str,
    parameter: nn.Parameter,
    start: int,
    stop: int,
    read: Callable[[], Tensor],
    places: ModelPlaces,
    is_mine: bool,
) -> Content:
    """The elements `start` to `stop` of the parameter's flat shard, which `read` returns."""
    placement = places.placements[parameter]
    return Content(key, placement.whole_shape, tuple(placement.boxes(start, stop)), start, read, is_mine)


def _same(tensor: Tensor) -> Tensor:
    return tensor
