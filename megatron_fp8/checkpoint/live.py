"""Collects the state of a running job for a checkpoint, and restores it.

Restored are master weights, moments, step, loss scale, schedule, FP8 scaling state and random streams; the model's
weights follow from the master weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from transformer_engine.pytorch import Float8Tensor

from megatron_fp8.checkpoint.contents import (
    Content,
    ModelPlaces,
    fp8_weight_tensors,
    optimizer_tensors,
    read_streams,
    stream_owner,
    whole_content,
    write_streams,
)
from megatron_fp8.checkpoint.manifest import CheckpointError
from megatron_fp8.checkpoint.plain_index import FP8_WEIGHT, FP8_WEIGHT_SCALE, PRECISION, STREAM
from megatron_fp8.checkpoint.rank_io import all_or_none, unclaimed
from megatron_fp8.checkpoint.tensor_files import TensorReader, scaling_state
from megatron_fp8.config.problem import first_few
from megatron_fp8.optim.state import (
    MASTER,
    NAMES,
    WEIGHT,
    StatePart,
    allocate_state,
    masters_to_parameters,
    read_scalars,
    state_parts,
    write_scalars,
)
from megatron_fp8.precision.manager import PrecisionManager

_SCALES = "state_scales"
# Scaling state reports itself what it cannot use. Weights are not needed where the master weights are not rounded.
_NOT_STATES = (PRECISION, FP8_WEIGHT, FP8_WEIGHT_SCALE, f"{WEIGHT}.")


@dataclass(frozen=True)
class LiveState:
    """The parts of a job that change while it trains, on this rank."""

    chunks: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    precision: PrecisionManager
    places: ModelPlaces
    device: torch.device

    def scalars(self) -> dict[str, float]:
        """Numbers for the manifest, the same on every rank."""
        return {**read_scalars(self.optimizer), "schedule_steps": self.schedule.num_steps}

    def contents(self, own: Mapping[str, Tensor]) -> Iterator[Content]:
        """This rank's share of the checkpoint, and its `own` tensors, which differ from rank to rank.

        States that are kept scaled become FP32 one by one, as they are read.
        """
        allocate_state(self.optimizer)
        groups = self.places.groups
        for _, _, content in optimizer_tensors(self.optimizer, self.places):
            yield content
        for _, content, scale in fp8_weight_tensors(self.places):
            yield from (content, scale)
        is_first_in_stage = groups.tp.rank() == groups.dp.rank() == 0
        for name, tensor in self.precision.state_dict().items():
            # A rank's own state has its own name, a layer's is on one stage, the rest is on every rank.
            is_mine = "@" in name or (is_first_in_stage if name.startswith("layers.") else groups.rank == 0)
            yield whole_content(PRECISION + name, tensor, is_mine)
        streams = {f"{STREAM}{name}": state for name, state in read_streams(self.device).items()}
        for name, tensor in {**streams, **own, **self._state_scales()}.items():
            yield whole_content(f"{name}@{stream_owner(groups)}", tensor, True)

    def load_own(self, directory: Path, name: str) -> Tensor | None:
        """An own tensor of this rank; under another layout the sum of all ranks' on rank 0, and zeros on the others.

        None if it was not saved.
        """
        return self._own(TensorReader(directory), name)

    def _own(self, saved: TensorReader, name: str) -> Tensor | None:
        mine = f"{name}@{stream_owner(self.places.groups)}"
        every = [key for key in saved.index if key.startswith(f"{name}@")]
        same_layout = mine in every and len(every) == self.places.groups.world_size
        keys = [mine] if same_layout else sorted(every)
        if not keys:
            return None
        total = torch.stack([saved.read(key) for key in keys]).sum(dim=0)
        return total if same_layout or self.places.groups.rank == 0 else torch.zeros_like(total)

    def load(self, directory: Path, scalars: Mapping[str, float], weights_only: bool = False) -> list[str]:
        """Restore the checkpoint in `directory`; returns notes on what was changed or lost.

        `weights_only`: only the master weights, as for fine-tuning; all else stays as at the start of a run. Raises
        CheckpointError, before anything is changed, if the checkpoint belongs to another model.
        """
        saved = TensorReader(directory)
        allocate_state(self.optimizer)
        states = list(optimizer_tensors(self.optimizer, self.places, (MASTER,) if weights_only else None))
        has_weights = any(name == WEIGHT and content.key in saved.index for _, name, content in states)
        states = [state for state in states if state[1] != WEIGHT or has_weights]
        mine = {content.key for _, _, content in states}
        unknown = _unknown_states(directory, unclaimed(sorted(saved.index), mine, self.device))
        with all_or_none():
            _require_same_model(directory, saved, [content for _, _, content in states])
            self._load_states(saved, states, with_scales=not weights_only)
            weights = [] if weights_only else list(self._saved_fp8_weights(saved))
            others = {} if weights_only else self._others(saved)
        if weights_only:
            masters_to_parameters(self.optimizer, self.chunks)
            return []
        write_scalars(self.optimizer, scalars)
        self.schedule.num_steps = 0
        self.schedule.step(int(scalars["schedule_steps"]))
        notes = [*unknown, *self._restore_others(others, saved)]
        masters_to_parameters(self.optimizer, self.chunks, has_weights)
        self._restore_fp8_weights(weights)
        return notes

    def _load_states(
        self, saved: TensorReader, states: Sequence[tuple[StatePart, str, Content]], with_scales: bool
    ) -> None:
        """Read the optimizer's states in place; those that are kept scaled by way of one FP32 copy at a time."""
        scales = self._saved_scales(saved)
        for part, name, content in states:
            values = part.read(name)
            _fill(saved, content, values)
            scaled = with_scales and part.scale(name) is not None
            part.write(name, values, next(scales, None) if scaled else None)
            # Before the next one is made.
            del values

    def _saved_fp8_weights(self, saved: TensorReader) -> Iterator[tuple[Float8Tensor, Tensor, Tensor]]:
        """(weight, its bytes, its inverse scale) as saved; casting the master weights would not give them."""
        for weight, content, scale in fp8_weight_tensors(self.places):
            if scale.key in saved.index:
                data, scale_inv = torch.empty_like(weight._data), torch.empty_like(weight._scale_inv)
                _fill(saved, content, data.view(-1))
                _fill(saved, scale, scale_inv.view(-1))
                yield weight, data, scale_inv

    def _state_scales(self) -> dict[str, Tensor]:
        """The scales of this rank's FP16 and FP8 states, concatenated; they belong to the layout."""
        parts = state_parts(self.optimizer)
        scales = [scale.view(1) for part in parts for name in NAMES if (scale := part.scale(name)) is not None]
        return {_SCALES: torch.cat(scales)} if scales else {}

    def _saved_scales(self, saved: TensorReader) -> Iterator[Tensor]:
        """What `_state_scales` returned under the same layout; nothing under another."""
        mine = self._state_scales().get(_SCALES)
        stored = saved.index.get(f"{_SCALES}@{stream_owner(self.places.groups)}")
        if mine is None or stored is None or stored.shape != tuple(mine.shape):
            return iter(())
        scales = self._own(saved, _SCALES)
        return iter(()) if scales is None else iter(torch.split(scales.to(self.device), 1))

    def _restore_fp8_weights(self, saved: Sequence[tuple[Float8Tensor, Tensor, Tensor]]) -> None:
        """Restore FP8 weights, and drop the running amaxes that casting the master weights has left."""
        for weight, content, scale_inv in saved:
            weight._data.copy_(content)
            weight._scale_inv.copy_(scale_inv)
            weight._reset_caches()
        if saved:
            self.precision.finish_step(skipped=True)

    def _others(self, saved: TensorReader) -> dict[str, Tensor]:
        """What is read whole: scaling state of all ranks, random streams of this one."""
        mine = f"@{stream_owner(self.places.groups)}"
        wanted = [n for n in saved.index if n.startswith(PRECISION) or (n.startswith(STREAM) and n.endswith(mine))]
        return {name: saved.read(name) for name in wanted}

    def _restore_others(self, loaded: Mapping[str, Tensor], saved: TensorReader) -> list[str]:
        notes = self.precision.load_state_dict(scaling_state(loaded))
        streams = {name[len(STREAM) :].split("@")[0]: t for name, t in loaded.items() if name.startswith(STREAM)}
        if streams:
            write_streams(streams, self.device)
        elif any(name.startswith(STREAM) for name in saved.index):
            notes.append("random streams of dropout start from scratch: the saved ones belong to another layout")
        return notes


def _fill(saved: TensorReader, content: Content, values: Tensor) -> None:
    saved.fill(content.key, values, content.boxes, content.first)


def _unknown_states(directory: Path, names: Sequence[str]) -> list[str]:
    """A note on tensors that no rank restores, except those that a run can do without.

    Raises CheckpointError for master weights: the checkpoint belongs to a model with other parameters.
    """
    unknown = [name for name in names if not name.startswith(_NOT_STATES) and "@" not in name]
    masters = [name for name in unknown if name.startswith(f"{MASTER}.")]
    if masters:
        raise CheckpointError(f"{directory} belongs to another model: this one has no {first_few(masters)}")
    return [f"tensors that this version does not know are not loaded: {first_few(unknown)}"] if unknown else []


def _require_same_model(directory: Path, saved: TensorReader, contents: Sequence[Content]) -> None:
    wrong = []
    for key, shape in {content.key: content.whole_shape for content in contents}.items():
        stored = saved.index.get(key)
        if stored is None:
            wrong.append(f"{key} is missing")
        elif stored.shape != shape:
            wrong.append(f"{key} has shape {list(stored.shape)}, this model's is {list(shape)}")
    if wrong:
        raise CheckpointError(f"{directory} belongs to another model: {first_few(wrong, '; ')}")
