"""Owns the comparison of what several ranks hold alike: checksums on the device, who differs, and what that means.

A flipped bit in memory, a wrong result of a failing GPU or a race in communication leaves replicas that differ. Nothing
fails then; the run only learns worse. Must not know models or number formats: a tensor is its bytes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

# 32 MB at a time, so that little memory is needed beside the tensor.
_CHUNK_BYTES = 1 << 25
_WORD_BYTES = 8
# Odd, so that multiplying by one loses nothing modulo 2^64 (they are those of splitmix64).
_BY_PLACE = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


class ReplicaError(RuntimeError):
    """Ranks that should hold the same do not; the text says what and which."""


@dataclass(frozen=True)
class Alike:
    """Tensors that all ranks of `group` should hold alike, by name; every rank has the same names in the same order."""

    group: ProcessGroup
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """A tensor of which ranks hold different bytes. `suspects`: those that a majority contradicts; empty: no majority.

    `ranks`: all that should hold the same.
    """

    name: str
    ranks: tuple[int, ...]
    suspects: tuple[int, ...]

    def text(self, hosts: Sequence[str]) -> str:
        """In words; `hosts` by rank."""
        if not self.suspects:
            who = ", ".join(_place(rank, hosts) for rank in self.ranks)
            return f"{self.name} differs between {who}; which of them is wrong cannot be told"
        right = [rank for rank in self.ranks if rank not in self.suspects]
        who = ", ".join(_place(rank, hosts) for rank in self.suspects)
        return f"{self.name} on {who} differs from the {len(right)} other replicas"


def _place(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank} ({hosts[rank]})"


def checksum(tensor: Tensor) -> Tensor:
    """An int64 `[]` on the tensor's device that any change of its bytes within one 8-byte word changes for certain.

    Words are mixed with their place, one to one, and summed modulo 2^64: no order of adding, and so no device, gives
    another sum. Changes of several words go unseen once in 2^64.
    """
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, content.numel(), _CHUNK_BYTES):
        piece = content[start : start + _CHUNK_BYTES]
        # A copy, since a parameter that lies in a buffer may begin at any byte.
        padded = piece.new_zeros(-(-piece.numel() // _WORD_BYTES) * _WORD_BYTES)
        padded[: piece.numel()] = piece
        words = padded.view(torch.int64)
        first = start // _WORD_BYTES
        words += torch.arange(first, first + words.numel(), device=tensor.device).mul_(_BY_PLACE)
        _fold(words, 30).mul_(_FIRST)
        _fold(words, 27).mul_(_SECOND)
        total += _fold(words, 31).sum()
    return total


def _fold(words: Tensor, bits: int) -> Tensor:
    """`words ^= words >> bits`, without the sign's copies: one to one, and high bits reach low ones."""
    high = (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)
    return words.bitwise_xor_(high)


def find_differences(alike: Alike) -> list[Difference]:
    """What the ranks of the group do not hold alike, the same on all of them; collective over the group.

    One small collective where all is well.
    """
    if alike.group.size() == 1 or not alike.tensors:
        return []
    own = torch.stack([checksum(tensor) for tensor in alike.tensors.values()])
    # The largest of c and of -1 - c, which is the smallest of c.
    extremes = torch.stack([own, ~own])
    torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX, group=alike.group)
    differ = (extremes[0] != ~extremes[1]).tolist()
    if not any(differ):
        return []
    sums = [torch.empty_like(own) for _ in range(alike.group.size())]
    torch.distributed.all_gather(sums, own, group=alike.group)
    ranks = torch.distributed.get_process_group_ranks(alike.group)
    by_tensor = torch.stack(sums, dim=1).tolist()
    return [
        Difference(name, tuple(ranks), suspects(ranks, column))
        for name, column, unequal in zip(alike.tensors, by_tensor, differ, strict=True)
        if unequal
    ]


def suspects(ranks: Sequence[int], sums: Sequence[int]) -> tuple[int, ...]:
    """The ranks whose sum is not that of more than half of them; empty where no sum is."""
    value, count = Counter(sums).most_common(1)[0]
    if 2 * count <= len(sums):
        return ()
    return tuple(rank for rank, own in zip(ranks, sums, strict=True) if own != value)
