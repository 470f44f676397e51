"""Owns the words for where NaN and infinity were found in a step: which ranks, whose loss, which parameters.

Must not know how they were looked for, or what is done about them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MOST_RANKS, _MOST_NAMES = 4, 3


@dataclass(frozen=True)
class RankFinding:
    """What of a step is not finite on one rank.

    `place`: the rank and its coordinates in words. `loss`: whether the loss of its own samples is not. `gradients`:
    names of parameters whose gradients are not.
    """

    place: str
    loss: bool
    gradients: tuple[str, ...]

    def __str__(self) -> str:
        found = ["the loss of its samples"] if self.loss else []
        if self.gradients:
            named = ", ".join(self.gradients[:_MOST_NAMES])
            more = len(self.gradients) - _MOST_NAMES
            found.append(f"the gradients of {named}{f' and {more} more' if more > 0 else ''}")
        return f"{self.place}: {' and '.join(found)}"


def describe_findings(findings: Sequence[RankFinding], data_parallel_size: int) -> str:
    """Where NaN or infinity is, in a line; `findings` has one for each rank."""
    found = [each for each in findings if each.loss or each.gradients]
    if not found:
        return "the sum over all ranks alone is not finite"
    # A loss belongs to a rank's own samples, so it says who began.
    found.sort(key=lambda each: not each.loss)
    told = "; ".join(map(str, found[:_MOST_RANKS]))
    if len(found) > _MOST_RANKS:
        told += f"; and {len(found) - _MOST_RANKS} more ranks"
    if data_parallel_size > 1 and any(each.gradients for each in found):
        told += " (gradients are looked at when they have been added up over data-parallel ranks)"
    return told
