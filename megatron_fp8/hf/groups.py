"""Owns the form of a correspondence: which tensors of ours hold the same numbers as which of Hugging Face's.

Both sides are made of the same parts, each a matrix `[out, in]` or a bias: the query, key and value projection, the
gate and the up projection, or one part alone. A side may stack its parts in one tensor. Shapes only; imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of ours and of theirs that hold the same numbers.

    `ours`, `theirs`: names; as many as there are parts, or one for all parts stacked. `parts`: shapes. Stacked parts
    of ours lie in `num_blocks` blocks one after another, each with its share of every part (TE's order of queries,
    keys and values by query group); theirs always in one. `transposed`: theirs is `[in, out]` (GPT-2's Conv1D).
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
