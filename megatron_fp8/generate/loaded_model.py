"""Loads a checkpoint's model for inference on this rank: no optimizer, no gradients, no master weights.

Its weights are the checkpoint's master weights in the format of the parameters, its FP8 scales the saved ones. Runs
under torchrun or in a single process.

    with kept_checkpoint(path) as checkpoint:
        saved = read_saved_model(checkpoint, InferenceSettings(tensor_model_parallel_size=2), world_size())
        with open_model(saved) as model:
            stepper = model.stepper()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_fp8 import device as devices
from megatron_fp8.checkpoint.manifest import CheckpointError
from megatron_fp8.checkpoint.plain_index import FP8_WEIGHT, FP8_WEIGHT_SCALE, MASTER, PRECISION, WEIGHT
from megatron_fp8.checkpoint.saved_model import SavedModel
from megatron_fp8.config.layout import Layout, derive_layout
from megatron_fp8.config.problem import first_few
from megatron_fp8.config.schema import Config
from megatron_fp8.errors import BadInputError
from megatron_fp8.model.sharding import ParameterSharding, parameter_sharding
from megatron_fp8.parallel.object_collectives import all_gather
from megatron_fp8.parallel.process_group import init_process_group
from megatron_fp8.precision.policy import build_policy
from megatron_fp8.report.library_warnings import hide_meaningless_warnings

if TYPE_CHECKING:
    # They look for CUDA when imported, so `devices.prepare()` comes first.
    from megatron_fp8.checkpoint.tensor_files import TensorReader
    from megatron_fp8.model.gpt import GPTStage
    from megatron_fp8.parallel.groups import ParallelGroups
    from megatron_fp8.precision.manager import PrecisionManager
    from megatron_fp8.train.step import BatchShape, Stepper


@dataclass(frozen=True)
class LoadedModel:
    """This rank's part of a model for inference.

    `config`, `layout`: of this job, not of the run that wrote the checkpoint. `stages`: one, in evaluation mode,
    without Megatron's DDP. `num_positions`: the longest text in tokens. `notes`: what was not restored exactly.
    """

    config: Config
    layout: Layout
    vocab_size: int
    num_positions: int
    device: devices.Device
    groups: ParallelGroups
    precision: PrecisionManager
    stages: Sequence[GPTStage]
    notes: tuple[str, ...]

    @property
    def batch_shape(self) -> BatchShape:
        """Sizes of the batches that a stepper evaluates on this rank."""
        from megatron_fp8.train.step import BatchShape

        layout = self.layout
        return BatchShape(layout.num_microbatches, layout.seq_length, layout.micro_batch_size)

    def stepper(self) -> Stepper:
        """Evaluates batches; it cannot train these stages."""
        from megatron_fp8.train.step import Stepper
        from megatron_fp8.train.step_times import StepTimes

        times = StepTimes(self.device)
        return Stepper(self.stages, self.groups, self.precision, self.device.torch_device, times)


@contextmanager
def open_model(saved: SavedModel) -> Iterator[LoadedModel]:
    """Start the process group, load the model, and destroy the group at the end; collective.

    Without a launcher this process is the whole job. Raises CheckpointError as `load_model` does.
    """
    device = devices.prepare()
    hide_meaningless_warnings(device.emulated)
    parallel = saved.config.parallel
    init_process_group(device.backend(parallel.distributed_backend), parallel.distributed_timeout_minutes)
    _require_one_checkpoint(saved)
    yield load_model(saved, device)
    # Not after an exception: other ranks may still be in a collective, for which this would wait.
    torch.distributed.destroy_process_group()


def _require_one_checkpoint(saved: SavedModel) -> None:
    """Each rank looked for the latest checkpoint itself; the run may have saved a newer one in between."""
    iterations = all_gather(saved.manifest.iteration)
    if len(set(iterations)) > 1:
        raise BadInputError(
            f"the ranks found different latest checkpoints, of iterations {sorted(set(iterations))}: the run is still "
            f"saving, or the nodes do not share a file system\n    use: --iteration {min(iterations)}"
        )


def load_model(saved: SavedModel, device: devices.Device) -> LoadedModel:
    """Build this rank's part and fill it from the checkpoint, within a process group; collective.

    Whole tensors are read and cut one at a time: beside the model a rank holds one parameter in FP32. Raises
    CheckpointError when a file is corrupt or the tensors do not fit the checkpoint's config.
    """
    from megatron_fp8.checkpoint.tensor_files import TensorReader, scaling_state
    from megatron_fp8.model.build import attach_layers, build_stages
    from megatron_fp8.parallel.groups import amax_group, build_groups, seed_ranks
    from megatron_fp8.precision.manager import PrecisionManager

    config = saved.config
    groups = build_groups(config.parallel)
    seed_ranks(config.training.seed, groups)
    layout = derive_layout(config, groups.world_size, saved.vocab_size)
    policy = build_policy(config.precision, config.model.num_layers)
    amaxes = amax_group(config.precision.amax_reduction, groups)
    precision = PrecisionManager(policy, amaxes, device.torch_device)
    stages = build_stages(config, layout, saved.vocab_size, groups, precision, device.torch_device)
    attach_layers(precision, stages)
    reader = TensorReader(saved.checkpoint)
    saved_state = {name: reader.read(name) for name in reader.index if name.startswith(PRECISION)}
    notes = precision.load_state_dict(scaling_state(saved_state) if policy.fp8 is not None else {})
    _fill(stages, reader, config.model.activation, groups)
    precision.fall_back(saved.fallen_back)
    for stage in stages:
        stage.eval().requires_grad_(False)
    return LoadedModel(
        config, layout, saved.vocab_size, saved.num_positions, device, groups, precision, stages, tuple(notes)
    )


@torch.no_grad()
def _fill(stages: Sequence[GPTStage], reader: TensorReader, activation: str, groups: ParallelGroups) -> None:
    """Set every parameter; collective over the data-parallel group if weights are in FP8."""
    from transformer_engine.pytorch import Float8Quantizer, QuantizedTensor
    from transformer_engine.pytorch.tensor.utils import quantize_master_weights

    from megatron_fp8.model.build import global_parameters

    named = list(global_parameters(stages))
    missing = [name for name, _ in named if MASTER + name not in reader.index]
    if missing:
        raise CheckpointError(f"the checkpoint lacks tensors of the model in its config: {first_few(missing)}")
    for name, parameter in named:
        sharding = parameter_sharding(name, activation)
        if not isinstance(parameter, QuantizedTensor):
            stored = WEIGHT + name if WEIGHT + name in reader.index else MASTER + name
            parameter.copy_(_my_part(reader, stored, parameter, sharding, groups.tp))
            continue
        parameter.clear_high_precision_init_val()
        if FP8_WEIGHT_SCALE + name in reader.index and isinstance(parameter._quantizer, Float8Quantizer):
            parameter._data.copy_(_my_part(reader, FP8_WEIGHT + name, parameter, sharding, groups.tp))
            parameter._scale_inv.copy_(reader.read(FP8_WEIGHT_SCALE + name))
            parameter._reset_caches()
            continue
        # As the optimizer does in a step.
        master = _my_part(reader, MASTER + name, parameter, sharding, groups.tp).to(parameter.device)
        quantize_master_weights([parameter], [master.reshape(-1)], [0], groups.dp)


def _my_part(
    reader: TensorReader, stored: str, parameter: Tensor, sharding: ParameterSharding, tp: ProcessGroup
) -> Tensor:
    """This rank's part of a stored parameter, of the shape of `parameter`; padding rows are 0."""
    shape = sharding.full_shape(parameter.shape, tp.size())
    whole = reader.read(stored)
    if whole.shape[1:] != tuple(shape[1:]) or len(whole) > shape[0]:
        raise CheckpointError(f"{stored} has shape {list(whole.shape)}; the checkpoint's config makes it {shape}")
    if len(whole) < shape[0]:
        whole = torch.cat([whole, whole.new_zeros(shape[0] - len(whole), *shape[1:])])
    return sharding.local_shard(whole, tp.rank(), tp.size())
