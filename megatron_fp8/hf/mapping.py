"""Maps our tensors to Hugging Face's and back, and reads the values of a `config.json`.

Both sides are made of the same parts, each a matrix `[out, in]` or a bias: the query, key and value projections, the
gate and the up projection, or one part alone. A side may stack its parts in one tensor. Values are moved, not changed.
Imports torch only where tensors are moved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    values by query group); theirs into one. `transposed`: theirs is `[in, out]` (GPT-2's Conv1D).
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    parts: tuple[Shape, ...]
    num_blocks: int = 1
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
    import torch

    parts = list(ours) if len(ours) == len(group.parts) else _unstack(group, ours[0], group.num_blocks)
    theirs = parts if len(group.theirs) == len(parts) else [torch.cat(parts)]
    return [tensor.t() for tensor in theirs] if group.transposed else theirs


def to_ours(group: TensorGroup, theirs: Sequence[Tensor]) -> list[Tensor]:
    """Our tensors of a group from Hugging Face's, in the order of `group.ours`."""
    tensors = [tensor.t() for tensor in theirs] if group.transposed else list(theirs)
    parts = tensors if len(tensors) == len(group.parts) else _unstack(group, tensors[0], 1)
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
    """The values of a Hugging Face `config.json`; mistakes are collected."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values = values
        self._path = path
        self.problems: list[Problem] = []

    def get(self, key: str, default: Any = None) -> Any:
        """A value; `default` where it is missing or null."""
        value = self._values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; required without a `default`."""
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.reject(key, value, "it must be a positive integer", "the config.json that belongs to the weights")
        return 1

    def only(self, key: str, wanted: Any, default: Any, reason: str) -> None:
        """Reject every value but `wanted`."""
        value = self.get(key, default)
        if value != wanted:
            self.reject(key, value, reason, f"a model with {key}={wanted!r}")

    def choice(self, key: str, choices: Mapping[str, str], default: str) -> str:
        """What `choices` maps the value to; other values are rejected."""
        value = self.get(key, default)
        if value in choices:
            return choices[value]
        self.reject(key, value, "it is not supported", f"a model with one of {', '.join(choices)}")
        return next(iter(choices.values()))

    def reject(self, key: str, value: Any, reason: str, use: str) -> None:
        """Record a mistake."""
        self.problems.append(Problem(key, value, reason, use, self._path))

    def finish(self) -> None:
        """Raise ConfigError with all mistakes, if any."""
        if self.problems:
            raise ConfigError.from_problems(self.problems)


def require(model_values: Mapping[str, Any], wanted: Mapping[str, tuple[Any, ...]], form: str) -> None:
    """Raise ConfigError with every value of our `model` section that `form` cannot express."""
    problems = [
        Problem(
            f"model.{name}",
            model_values[name],
            f"{form} cannot express it",
            f"a model trained with model.{name}={' or '.join(map(str, choices))}",
        )
        for name, choices in wanted.items()
        if model_values[name] not in choices
    ]
    if problems:
        raise ConfigError.from_problems(problems)
