"""Owns what a checkpoint holds, as named tensors of the whole model and this rank's boxes of them.

Every name is free of the layout: `master.<parameter>`, `exp_avg.<parameter>`, `exp_avg_sq.<parameter>` in FP32,
`precision.<name>` (FP8 scaling state), `rng.<stream>@<coordinates>`; numbers are in the manifest. The model's own
weights are not there: they are the masters, rounded. Built on Megatron Core's `ShardedTensor`; must not know
directories.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn
from transformer_engine.pytorch import Float8Quantizer, Float8Tensor

from megatron_fp8.checkpoint.placement import Placement
from megatron_fp8.config.layout import Layout
from megatron_fp8.model.build import global_parameters
from megatron_fp8.model.sharding import parameter_sharding
from megatron_fp8.optim.state import StatePart, state_parts
from megatron_fp8.parallel.groups import ParallelGroups


@dataclass(frozen=True)
class ModelPlaces:
    """Where this rank's parameters lie in the whole model's: global names, and placements by parameter."""

    names: Mapping[nn.Parameter, str]
    placements: Mapping[nn.Parameter, Placement]
    groups: ParallelGroups
    distributed_optimizer: bool

    def replica(self, parameter: nn.Parameter) -> tuple[int, int, int]:
        """Megatron's replica number: all zero for the rank that writes. (copy on another stage, TP, DP)."""
        divided = self.placements[parameter].sharding.axis is not None
        # The last stage's copy of a tied embedding has the first one's name.
        copy = int(self.names[parameter].startswith("embedding.") and not self.groups.is_first_stage)
        tp = 0 if divided else self.groups.tp.rank()
        return copy, tp, 0 if self.distributed_optimizer else self.groups.dp.rank()


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
) -> Iterator[tuple[StatePart, str, Tensor, list[ShardedTensor]]]:
    """(part, state name, flat values, their boxes as views) of all that this rank keeps of the optimizer.

    `names`: of the states; None: those that are needed to go on exactly.
    """
    for part in state_parts(optimizer):
        for name in part.names if names is None else names:
            values = part.read(name)
            yield part, name, values, list(_boxes(f"{name}.{places.names[part.parameter]}", part, values, places))


def fp8_weight_tensors(places: ModelPlaces) -> Iterator[tuple[Float8Tensor, list[ShardedTensor], ShardedTensor]]:
    """(weight, boxes of its bytes, its inverse scale) of every weight that lives in FP8 with delayed scaling.

    The masters do not say what these bytes are: they were cast with a scale that has been replaced since.
    """
    for parameter, name in places.names.items():
        if isinstance(parameter, Float8Tensor) and isinstance(parameter._quantizer, Float8Quantizer):
            copy, tp, _ = places.replica(parameter)
            # Whatever the optimizer divides, every data-parallel rank has the whole bytes, and every rank the scale.
            dp = places.groups.dp.rank()
            boxes = list(_cut(f"fp8_weights.{name}", parameter, 0, parameter._data.view(-1), places, (copy, tp, dp)))
            every_rank = (copy, places.groups.tp.rank(), dp)
            yield parameter, boxes, whole_tensor(f"fp8_weight_scales.{name}", parameter._scale_inv, every_rank)


def _boxes(key: str, part: StatePart, values: Tensor, places: ModelPlaces) -> Iterator[ShardedTensor]:
    yield from _cut(key, part.parameter, part.start, values, places, places.replica(part.parameter))


def _cut(
    key: str, parameter: nn.Parameter, start: int, values: Tensor, places: ModelPlaces, replica: tuple[int, int, int]
) -> Iterator[ShardedTensor]:
    """Boxes of flat `values`, which begin at element `start` of the parameter's flat shard."""
    placement = places.placements[parameter]
    for box in placement.boxes(start, start + values.numel()):
        yield ShardedTensor(
            key=key,
            data=values[box.start - start : box.stop - start].view(box.shape),
            dtype=values.dtype,
            local_shape=box.shape,
            global_shape=placement.whole_shape,
            global_offset=box.offset,
            # No regular grid: ranges of the optimizer's buffers end anywhere.
            axis_fragmentations=None,
            replica_id=replica,
        )


def whole_tensor(key: str, tensor: Tensor, replica: int | tuple[int, ...]) -> ShardedTensor:
    """A tensor that one rank writes whole (`replica` all 0) and others hold too."""
    tensor = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    return ShardedTensor(
        key=key,
        data=tensor,
        dtype=tensor.dtype,
        local_shape=tuple(tensor.shape),
        global_shape=tuple(tensor.shape),
        global_offset=(0,) * tensor.dim(),
        axis_fragmentations=None,
        replica_id=replica,
    )
