"""Owns the state of a running job seen as a checkpoint sees it: gathered to be saved, and put back.

Loading restores the masters, moments, step, loss scale, schedule, FP8 scaling state and random streams; the model's
weights follow from the masters. Must not know directories or when to save.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from transformer_engine.pytorch import Float8Tensor

from megatron_fp8.checkpoint.contents import ModelPlaces, fp8_weight_tensors, optimizer_tensors, whole_tensor
from megatron_fp8.checkpoint.index import StoredTensor, read_index
from megatron_fp8.checkpoint.manifest import CheckpointError
from megatron_fp8.checkpoint.streams import read_streams, stream_owner, write_streams
from megatron_fp8.optim.state import (
    MASTER,
    NAMES,
    WEIGHT,
    allocate_state,
    masters_to_parameters,
    read_scalars,
    state_parts,
    write_scalars,
)
from megatron_fp8.precision.manager import PrecisionManager

_PRECISION, _STREAM = "precision.", "rng."
_SCALES = "state_scales"


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
        """Numbers to be saved in the manifest, the same on every rank."""
        return {**read_scalars(self.optimizer), "schedule_steps": self.schedule.num_steps}

    def tensors_to_save(self, own: Mapping[str, Tensor]) -> dict[str, Any]:
        """Megatron's sharded state dict of everything, and of tensors that are this rank's `own`.

        Its tensors are the live ones.
        """
        allocate_state(self.optimizer)
        groups = self.places.groups
        boxes: dict[str, Any] = {}
        for _, _, _, parts in optimizer_tensors(self.optimizer, self.places):
            boxes.update(_by_place(parts))
        for _, parts, scale in fp8_weight_tensors(self.places):
            boxes.update(_by_place([*parts, scale]))
        in_stage = groups.tp.rank() + groups.tp.size() * groups.dp.rank()
        for name, tensor in self.precision.state_dict().items():
            # A rank's own state has its own name; a layer's is in one stage; the rest is everywhere.
            replica = 0 if "@" in name else in_stage if name.startswith("layers.") else groups.rank
            boxes[_PRECISION + name] = whole_tensor(_PRECISION + name, tensor, replica)
        streams = {f"{_STREAM}{name}": state for name, state in read_streams(self.device).items()}
        for name, tensor in {**streams, **own, **self._state_scales()}.items():
            key = f"{name}@{stream_owner(groups)}"
            boxes[key] = whole_tensor(key, tensor, 0)
        return boxes

    def load_own(self, directory: Path, name: str) -> Tensor | None:
        """A tensor that every rank saved as its own: this rank's, or under another layout the sum on rank 0, else 0.

        None where none was saved.
        """
        return self._own(directory, read_index(directory), name)

    def _own(self, directory: Path, index: Mapping[str, StoredTensor], name: str) -> Tensor | None:
        mine = f"{name}@{stream_owner(self.places.groups)}"
        every = [key for key in index if key.startswith(f"{name}@")]
        same_layout = mine in index and len(every) == self.places.groups.world_size
        keys = [mine] if same_layout else sorted(every)
        wanted = {key: whole_tensor(key, torch.zeros(index[key].shape, dtype=index[key].dtype), 0) for key in keys}
        if not wanted:
            return None
        dist_checkpointing.load(dict(wanted), str(directory), validate_access_integrity=False)
        total = torch.stack([tensor.data for tensor in wanted.values()]).sum(dim=0)
        return total if same_layout or self.places.groups.rank == 0 else torch.zeros_like(total)

    def load(self, directory: Path, scalars: Mapping[str, float], weights_only: bool = False) -> list[str]:
        """Take over the whole checkpoint in `directory`; returns what could not be carried over as it was.

        `weights_only`: the masters alone, as for a fine-tuning; everything else stays as at the start of a run.
        Raises CheckpointError, before anything is changed, when the checkpoint is of another model.
        """
        index = read_index(directory)
        allocate_state(self.optimizer)
        states = list(optimizer_tensors(self.optimizer, self.places, (MASTER,) if weights_only else None))
        has_weights = any(name == WEIGHT and boxes and boxes[0].key in index for _, name, _, boxes in states)
        if not has_weights:
            states = [state for state in states if state[1] != WEIGHT]
        _require_same_model(directory, index, [box for _, _, _, boxes in states for box in boxes])
        weights = [(w, parts, scale) for w, parts, scale in fp8_weight_tensors(self.places) if scale.key in index]
        others = {} if weights_only else self._others(index)
        wanted = dict(others)
        for _, _, _, boxes in states:
            wanted.update(_by_place(boxes))
        if not weights_only:
            for _, boxes, scale in weights:
                wanted.update(_by_place([*boxes, scale]))
        # The tensors are filled where they are.
        dist_checkpointing.load(wanted, str(directory), validate_access_integrity=False)
        scales = self._saved_scales(directory, index)
        fp8_bytes = [(weight, weight._data.clone(), scale.data.clone()) for weight, _, scale in weights]
        for part, name, values, _ in states:
            scaled = not weights_only and part.scale(name) is not None
            part.write(name, values, next(scales, None) if scaled else None)
        if weights_only:
            masters_to_parameters(self.optimizer, self.chunks)
            return []
        write_scalars(self.optimizer, scalars)
        self.schedule.num_steps = 0
        self.schedule.step(int(scalars["schedule_steps"]))
        notes = self._restore_others({name: tensor.data for name, tensor in others.items()}, index)
        masters_to_parameters(self.optimizer, self.chunks, has_weights)
        self._restore_fp8_weights(fp8_bytes)
        return notes

    def _state_scales(self) -> dict[str, Tensor]:
        """The scales of this rank's FP16 and FP8 states, one after another; they belong to the layout."""
        parts = state_parts(self.optimizer)
        scales = [scale.view(1) for part in parts for name in NAMES if (scale := part.scale(name)) is not None]
        return {_SCALES: torch.cat(scales)} if scales else {}

    def _saved_scales(self, directory: Path, index: Mapping[str, StoredTensor]) -> Iterator[Tensor]:
        """The scales that `_state_scales` gave on the same layout; none on another."""
        mine = self._state_scales().get(_SCALES)
        stored = index.get(f"{_SCALES}@{stream_owner(self.places.groups)}")
        if mine is None or stored is None or stored.shape != tuple(mine.shape):
            return iter(())
        saved = self._own(directory, index, _SCALES)
        return iter(()) if saved is None else iter(saved.to(self.device).split(1))

    def _restore_fp8_weights(self, saved: Sequence[tuple[Float8Tensor, Tensor, Tensor]]) -> None:
        """Put FP8 weights back as they were; what casting the masters has left in the running amaxes goes."""
        for weight, content, scale_inv in saved:
            weight._data.copy_(content)
            weight._scale_inv.copy_(scale_inv)
            weight._reset_caches()
        if saved:
            self.precision.finish_step(skipped=True)

    def _others(self, index: Mapping[str, StoredTensor]) -> dict[str, ShardedTensor]:
        """What is loaded whole: scaling state of any rank, this rank's random streams."""
        mine = f"@{stream_owner(self.places.groups)}"
        return {
            name: whole_tensor(name, torch.empty(stored.shape, dtype=stored.dtype), 0)
            for name, stored in index.items()
            if name.startswith(_PRECISION) or (name.startswith(_STREAM) and name.endswith(mine))
        }

    def _restore_others(self, loaded: Mapping[str, Tensor], index: Mapping[str, StoredTensor]) -> list[str]:
        scaling = {name.removeprefix(_PRECISION): t for name, t in loaded.items() if name.startswith(_PRECISION)}
        notes = self.precision.load_state_dict({name: _scalar_again(name, tensor) for name, tensor in scaling.items()})
        streams = {name[len(_STREAM) :].split("@")[0]: t for name, t in loaded.items() if name.startswith(_STREAM)}
        if streams:
            write_streams(streams, self.device)
        elif any(name.startswith(_STREAM) for name in index):
            notes.append("the random streams of dropout start anew: they belong to the ranks of another layout")
        return notes


def _by_place(boxes: Sequence[ShardedTensor]) -> dict[str, Any]:
    return {f"{box.key}@{box.global_offset}": box for box in boxes}


def _scalar_again(name: str, tensor: Tensor) -> Tensor:
    return tensor if name.startswith("layers.") else tensor.reshape(())


def _require_same_model(directory: Path, index: Mapping[str, StoredTensor], boxes: Sequence[ShardedTensor]) -> None:
    wrong = []
    for key, shape in {box.key: box.global_shape for box in boxes}.items():
        stored = index.get(key)
        if stored is None:
            wrong.append(f"{key} is not there")
        elif stored.shape != tuple(shape):
            wrong.append(f"{key} has shape {list(stored.shape)}, this model's is {list(shape)}")
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(f"{directory} is a checkpoint of another model: {'; '.join(wrong[:5])}{more}")
