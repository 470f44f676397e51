"""Owns the state of a running job seen as a checkpoint sees it: gathered to be saved, and put back.

Loading restores the masters, moments, step, loss scale, schedule, FP8 scaling state and random streams; the model's
weights follow from the masters. Must not know directories or when to save.
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
    whole_content,
)
from megatron_fp8.checkpoint.index import StoredTensor, read_index
from megatron_fp8.checkpoint.manifest import CheckpointError
from megatron_fp8.checkpoint.pieces import fill
from megatron_fp8.checkpoint.placement import whole_box
from megatron_fp8.checkpoint.streams import read_streams, stream_owner, write_streams
from megatron_fp8.checkpoint.together import all_or_none, on_no_rank
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

_PRECISION, _STREAM = "precision.", "rng."
_SCALES = "state_scales"
# Scaling state says itself what it cannot use. Weights are left out where the masters are not rounded.
_NOT_STATES = (_PRECISION, "fp8_weights.", "fp8_weight_scales.", f"{WEIGHT}.")
_MOST_NAMED = 5


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

    def contents(self, own: Mapping[str, Tensor]) -> Iterator[Content]:
        """Everything that this rank holds, and tensors that are this rank's `own`.

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
            # A rank's own state has its own name; a layer's is in one stage; the rest is everywhere.
            is_mine = "@" in name or (is_first_in_stage if name.startswith("layers.") else groups.rank == 0)
            yield whole_content(_PRECISION + name, tensor, is_mine)
        streams = {f"{_STREAM}{name}": state for name, state in read_streams(self.device).items()}
        for name, tensor in {**streams, **own, **self._state_scales()}.items():
            yield whole_content(f"{name}@{stream_owner(groups)}", tensor, True)

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
        if not keys:
            return None
        total = torch.stack([_whole(directory, key, index[key]) for key in keys]).sum(dim=0)
        return total if same_layout or self.places.groups.rank == 0 else torch.zeros_like(total)

    def load(self, directory: Path, scalars: Mapping[str, float], weights_only: bool = False) -> list[str]:
        """Take over the whole checkpoint in `directory`; returns what could not be carried over as it was.

        `weights_only`: the masters alone, as for a fine-tuning; everything else stays as at the start of a run.
        Raises CheckpointError, before anything is changed, when the checkpoint is of another model.
        """
        index = read_index(directory)
        allocate_state(self.optimizer)
        states = list(optimizer_tensors(self.optimizer, self.places, (MASTER,) if weights_only else None))
        has_weights = any(name == WEIGHT and content.key in index for _, name, content in states)
        states = [state for state in states if state[1] != WEIGHT or has_weights]
        mine = {content.key for _, _, content in states}
        unknown = _unknown_states(directory, on_no_rank(sorted(index), mine, self.device))
        with all_or_none(self.device):
            _require_same_model(directory, index, [content for _, _, content in states])
            self._load_states(directory, index, states, with_scales=not weights_only)
            weights = [] if weights_only else list(self._saved_fp8_weights(directory, index))
            others = {} if weights_only else self._others(directory, index)
        if weights_only:
            masters_to_parameters(self.optimizer, self.chunks)
            return []
        write_scalars(self.optimizer, scalars)
        self.schedule.num_steps = 0
        self.schedule.step(int(scalars["schedule_steps"]))
        notes = [*unknown, *self._restore_others(others, index)]
        masters_to_parameters(self.optimizer, self.chunks, has_weights)
        self._restore_fp8_weights(weights)
        return notes

    def _load_states(
        self,
        directory: Path,
        index: Mapping[str, StoredTensor],
        states: Sequence[tuple[StatePart, str, Content]],
        with_scales: bool,
    ) -> None:
        """Fill the optimizer's states where they are; those that are kept scaled by way of one FP32 copy at a time."""
        scales = self._saved_scales(directory, index)
        for part, name, content in states:
            values = part.read(name)
            _fill(directory, index, content, values)
            scaled = with_scales and part.scale(name) is not None
            part.write(name, values, next(scales, None) if scaled else None)
            # Before the next one is made.
            del values

    def _saved_fp8_weights(
        self, directory: Path, index: Mapping[str, StoredTensor]
    ) -> Iterator[tuple[Float8Tensor, Tensor, Tensor]]:
        """(weight, its bytes, its inverse scale) as they were saved, which the cast of the masters would not give."""
        for weight, content, scale in fp8_weight_tensors(self.places):
            if scale.key in index:
                saved, scale_inv = torch.empty_like(weight._data), torch.empty_like(weight._scale_inv)
                _fill(directory, index, content, saved.view(-1))
                _fill(directory, index, scale, scale_inv.view(-1))
                yield weight, saved, scale_inv

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

    def _others(self, directory: Path, index: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """What is loaded whole: scaling state of any rank, this rank's random streams."""
        mine = f"@{stream_owner(self.places.groups)}"
        return {
            name: _whole(directory, name, stored)
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


def _whole(directory: Path, name: str, stored: StoredTensor) -> Tensor:
    """A whole stored tensor, on the host."""
    tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    fill(directory, name, stored.indexed, tensor.view(-1), [whole_box(stored.shape)], 0)
    return tensor


def _fill(directory: Path, index: Mapping[str, StoredTensor], content: Content, values: Tensor) -> None:
    fill(directory, content.key, index[content.key].indexed, values, content.boxes, content.first)


def _scalar_again(name: str, tensor: Tensor) -> Tensor:
    return tensor if name.startswith("layers.") else tensor.reshape(())


def _unknown_states(directory: Path, names: Sequence[str]) -> list[str]:
    """What to say of tensors in a checkpoint that no rank takes, where a run is not known to do without them.

    Raises CheckpointError for masters: a model that lacks their parameters is another one.
    """
    unknown = [name for name in names if not name.startswith(_NOT_STATES) and "@" not in name]
    masters = [name for name in unknown if name.startswith(f"{MASTER}.")]
    if masters:
        raise CheckpointError(f"{directory} is a checkpoint of another model: this one has no {_some(masters, ', ')}")
    note = f"the checkpoint has what this program does not know, and leaves out: {_some(unknown, ', ')}"
    return [note] if unknown else []


def _some(texts: Sequence[str], separator: str) -> str:
    more = f", and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return f"{separator.join(texts[:_MOST_NAMED])}{more}"


def _require_same_model(directory: Path, index: Mapping[str, StoredTensor], contents: Sequence[Content]) -> None:
    wrong = []
    for key, shape in {content.key: content.whole_shape for content in contents}.items():
        stored = index.get(key)
        if stored is None:
            wrong.append(f"{key} is not there")
        elif stored.shape != shape:
            wrong.append(f"{key} has shape {list(stored.shape)}, this model's is {list(shape)}")
    if wrong:
        raise CheckpointError(f"{directory} is a checkpoint of another model: {_some(wrong, '; ')}")
