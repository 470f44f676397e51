"""Compares what several ranks should hold alike, by checksums made on the device, and ends a run whose replicas differ.

Weights are alike over the data-parallel ranks, those that tensor parallelism does not shard over the tensor-parallel
ranks too, a tied embedding over its two stages; FP8 scaling state over the ranks that share their amaxes. Master
weights and moments need no comparison of their own: each is held once, or its weights follow it.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_fp8.config.schema import Config
from megatron_fp8.model.build import global_parameters
from megatron_fp8.model.sharding import parameter_sharding
from megatron_fp8.monitors.protocol import Event, Monitor
from megatron_fp8.parallel.groups import ParallelGroups, amax_group
from megatron_fp8.parallel.object_collectives import all_gather
from megatron_fp8.precision.manager import PrecisionManager
from megatron_fp8.report.record import Value

# What TE's quantized weights consist of, kind by kind.
_STORED = (
    "_data",
    "_scale_inv",
    "_rowwise_data",
    "_rowwise_scale_inv",
    "_columnwise_data",
    "_columnwise_scale_inv",
)
_TIED = "embedding.word_embeddings.weight"
_MOST_NAMED = 8


class ReplicaMonitor(Monitor):
    """Compares replicas every `faults.replica_check_interval` steps."""

    def __init__(
        self,
        config: Config,
        chunks: Sequence[DistributedDataParallel],
        groups: ParallelGroups,
        precision: PrecisionManager,
    ) -> None:
        self._chunks = chunks
        self._groups = groups
        self._precision = precision
        self._amax_group = amax_group(config.precision.amax_reduction, groups)
        self._activation = config.model.activation
        self._tied = not config.model.untie_embeddings_and_output_weights
        self._interval = config.faults.replica_check_interval
        self._last_alike: int | None = None

    def after_step(self, iteration: int, updated: bool) -> Iterator[Event]:
        """Compare, when it is time; raises ReplicaError on every rank. Collective over all ranks."""
        del updated
        if iteration % self._interval:
            return
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                # Else weights would be gathered in the next forward pass.
                chunk.start_param_sync(force_sync=True)
        found = [difference for alike in self._alike() for difference in find_differences(alike)]
        yield from self._require_none(found, iteration)
        self._last_alike = iteration

    def _alike(self) -> Iterator[Alike]:
        divided: dict[str, Tensor] = {}
        whole: dict[str, Tensor] = {}
        for name, parameter in global_parameters(self._chunks):
            is_whole = parameter_sharding(name, self._activation).axis is None
            (whole if is_whole else divided).update(_stored(name, parameter))
        yield Alike(self._groups.dp, divided)
        yield Alike(self._groups.tp_dp, whole)
        if self._tied and self._groups.pp.size() > 1 and parallel_state.is_rank_in_embedding_group():
            yield Alike(parallel_state.get_embedding_group(), {k: v for k, v in divided.items() if k.startswith(_TIED)})
        if self._amax_group is not None:
            yield Alike(self._amax_group, self._precision.state_dict())

    def _require_none(self, found: Sequence[Difference], iteration: int) -> Iterator[Event]:
        flag = torch.tensor([float(bool(found))], device=self._precision.device)
        torch.distributed.all_reduce(flag)
        if not flag.item():
            return
        told = all_gather((socket.gethostname(), list(found)))
        hosts = [host for host, _ in told]
        # All ranks of a group have found the same.
        differences = list(dict.fromkeys(difference for _, theirs in told for difference in theirs))
        suspects = sorted({rank for difference in differences for rank in difference.suspects})
        texts = [difference.text(hosts) for difference in differences[:_MOST_NAMED]]
        if len(differences) > _MOST_NAMED:
            texts.append(f"and {len(differences) - _MOST_NAMED} more")
        values: dict[str, Value] = {
            "iteration": iteration,
            "tensors": len(differences),
            "first tensor": differences[0].name,
            "ranks": suspects,
            "hosts": sorted({hosts[rank] for rank in suspects}),
            "last alike": self._last_alike,
        }
        yield "replica", values
        raise ReplicaError(f"replicas differ at iteration {iteration}: {'; '.join(texts)}. {self._advice()}")

    def _advice(self) -> str:
        sound = "no comparison of this job has found them equal"
        if self._last_alike is not None:
            sound = f"they agreed at iteration {self._last_alike}: checkpoints up to it are sound"
        return (
            "Memory or a device has failed silently, or ranks did not compute the same. Exclude the host that is named "
            f"and resume from an earlier checkpoint (--resume checkpoint.ckpt_step=N); {sound}"
        )


def _stored(name: str, parameter: Tensor) -> dict[str, Tensor]:
    """The tensors that a parameter consists of: itself, or what TE keeps of a quantized one."""
    if not hasattr(parameter, "_quantizer"):
        return {name: parameter}
    parts = {inner: getattr(parameter, inner, None) for inner in _STORED}
    return {f"{name}.{inner}": part for inner, part in parts.items() if isinstance(part, Tensor)}


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
