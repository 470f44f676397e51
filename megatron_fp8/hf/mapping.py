"""Maps our tensors to Hugging Face's and back, and reads the values of a `config.json`.

Both sides are made of the same parts, each a matrix `[out, in]` or a bias: the query, key and value projections, the
gate and the up projection, or one part alone. A side may stack its parts in one tensor. Values are moved, not changed.
Imports torch only where tensors are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_fp8.config.problem import ConfigError, Problem

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
OnTensor = Callable[[str, int, int], None]
"""Called with each tensor of ours that was written, their number, and how many are done."""


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of ours and of theirs that hold the same numbers.

    `ours`, `theirs`: names; one for each part, or one for all parts stacked. `parts`: shapes. Our stacked parts are
    split into `num_blocks` consecutive blocks, each with its share of every part (TE's order of queries, keys and
    values by query group); theirs into `their_blocks`. `transposed`: theirs is `[in, out]` (GPT-2's Conv1D).
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    parts: tuple[Shape, ...]
    num_blocks: int = 1
    their_blocks: int = 1
    transposed: bool = False

    @property
    def our_shapes(self) -> dict[str, Shape]:
        """Shapes of our tensors, by name."""
        return dict(zip(self.ours, _shapes(self.parts, len(self.ours)), strict=True))

    @property
    def their_shapes(self) -> dict[str, Shape]:
        """Shapes of Hugging Face's tensors, by name."""
        shapes = _shapes(self.parts, len(self.theirs))
        return dict(zip(self.theirs, [shape[::-1] if self.transposed else shape for shape in shapes], strict=True))


def same(ours: str, theirs: str, *shape: int) -> TensorGroup:
    """One tensor that is the same on both sides."""
    return TensorGroup((ours,), (theirs,), (shape,))


def _shapes(parts: tuple[Shape, ...], num_tensors: int) -> list[Shape]:
    if num_tensors == len(parts):
        return list(parts)
    return [(sum(part[0] for part in parts), *parts[0][1:])]


def to_theirs(group: TensorGroup, ours: Sequence[Tensor]) -> list[Tensor]:
    """Hugging Face's tensors of a group from ours, in the order of `group.theirs`."""
    parts = list(ours) if len(ours) == len(group.parts) else _unstack(group, ours[0], group.num_blocks)
    theirs = parts if len(group.theirs) == len(parts) else [_stack(parts, group.their_blocks)]
    return [tensor.t() for tensor in theirs] if group.transposed else theirs


def to_ours(group: TensorGroup, theirs: Sequence[Tensor]) -> list[Tensor]:
    """Our tensors of a group from Hugging Face's, in the order of `group.ours`."""
    tensors = [tensor.t() for tensor in theirs] if group.transposed else list(theirs)
    parts = tensors if len(tensors) == len(group.parts) else _unstack(group, tensors[0], group.their_blocks)
    return parts if len(group.ours) == len(parts) else [_stack(parts, group.num_blocks)]


def _unstack(group: TensorGroup, stacked: Tensor, num_blocks: int) -> list[Tensor]:
    import torch

    blocks = stacked.reshape(num_blocks, -1, *stacked.shape[1:])
    rows = [part[0] // num_blocks for part in group.parts]
    return [part.reshape(shape) for part, shape in zip(torch.split(blocks, rows, dim=1), group.parts, strict=True)]


def _stack(parts: Sequence[Tensor], num_blocks: int) -> Tensor:
    import torch

    blocks = [part.reshape(num_blocks, -1, *part.shape[1:]) for part in parts]
    return torch.cat(blocks, dim=1).flatten(0, 1)


class HFSettings:
    """The values of a Hugging Face `config.json`; mistakes and notes are collected, and which keys were read."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values = values
        self._path = path
        self._read: set[str] = set()
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        """A value; `default` where it is missing or null."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def unless_missing(self, key: str, default: Any) -> Any:
        """A value, which may be null; `default` where it is missing."""
        self._read.add(key)
        return self._values.get(key, default)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; required without a `default`, which a null stands for, too."""
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.reject(key, value, "it must be a positive integer", "the config.json that belongs to the weights")
        return 1

    def count(self, key: str, default: int) -> int:
        """An integer that may be 0."""
        return 0 if self.get(key, default) == 0 else self.size(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.reject(key, value, "it must be true or false", "the config.json that belongs to the weights")
            return default
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """An object, as a copy; empty where it is missing or null."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            self.reject(key, value, "it must be an object", "the config.json that belongs to the weights")
            return {}
        return dict(value)

    def reject(self, key: str, value: Any, reason: str, use: str) -> None:
        """Record a mistake."""
        self.problems.append(Problem(key, value, reason, use, self._path))

    def reject_unread(self, harmless: Set[str]) -> None:
        """Reject every key that nobody has asked for and that may change what the model computes."""
        for key in self._values.keys() - self._read - harmless:
            value = self._values[key]
            if value not in (None, [], {}):
                reason = "it is not known what this changes in the model"
                self.reject(key, value, reason, "a model without it; or delete the key where it changes nothing")

    def finish(self) -> None:
        """Raise ConfigError with all mistakes, if any."""
        if self.problems:
            raise ConfigError.from_problems(self.problems)
