"""Owns what of a run several ranks hold alike, when it is compared, and the end of a run in which it differs.

Weights are alike over the data-parallel ranks, those that tensor parallelism does not divide over the tensor-parallel
ranks too, a tied embedding over its two stages; FP8 scaling state over the ranks that share their amaxes. Masters and
moments need no comparison of their own: each is held once, or its weights follow it. Must not know how tensors are
compared.
"""

import socket
from collections.abc import Iterator, Sequence

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_fp8.config.schema import Config
from megatron_fp8.faults.replicas import Alike, Difference, ReplicaError, find_differences
from megatron_fp8.model.build import global_parameters
from megatron_fp8.model.sharding import parameter_sharding
from megatron_fp8.parallel.groups import ParallelGroups, amax_group
from megatron_fp8.precision.manager import PrecisionManager
from megatron_fp8.report.record import Recorder, Value

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


class ReplicaCheck:
    """Compares replicas every `faults.replica_check_interval` steps."""

    def __init__(
        self,
        config: Config,
        chunks: Sequence[DistributedDataParallel],
        groups: ParallelGroups,
        precision: PrecisionManager,
        recorder: Recorder,
    ) -> None:
        self._chunks = chunks
        self._groups = groups
        self._precision = precision
        self._amax_group = amax_group(config.precision.amax_reduction, groups)
        self._activation = config.model.activation
        self._tied = not config.model.untie_embeddings_and_output_weights
        self._recorder = recorder
        self._interval = config.faults.replica_check_interval
        self._last_alike: int | None = None

    def after_step(self, iteration: int) -> None:
        """Compare, when it is time; raises ReplicaError on every rank. Collective over all ranks."""
        if not self._interval or iteration % self._interval or self._groups.world_size == 1:
            return
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                # Else weights would be gathered in the next forward pass.
                chunk.start_param_sync(force_sync=True)
        found = [difference for alike in self._alike() for difference in find_differences(alike)]
        self._require_none(found, iteration)
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

    def _require_none(self, found: Sequence[Difference], iteration: int) -> None:
        flag = torch.tensor([float(bool(found))], device=self._precision.device)
        torch.distributed.all_reduce(flag)
        if not flag.item():
            return
        told: list[tuple[str, list[Difference]]] = [("", [])] * self._groups.world_size
        torch.distributed.all_gather_object(told, (socket.gethostname(), list(found)))
        hosts = [host for host, _ in told]
        # All ranks of a group have found the same.
        differences = list(dict.fromkeys(difference for _, theirs in told for difference in theirs))
        suspects = sorted({rank for difference in differences for rank in difference.suspects})
        texts = [difference.text(hosts) for difference in differences[:_MOST_NAMED]]
        if len(differences) > _MOST_NAMED:
            texts.append(f"and {len(differences) - _MOST_NAMED} more")
        names: dict[str, Value] = {
            "iteration": iteration,
            "tensors": len(differences),
            "first tensor": differences[0].name,
            "ranks": suspects,
            "hosts": sorted({hosts[rank] for rank in suspects}),
            "last alike": self._last_alike,
        }
        self._recorder.write("replica", names)
        raise ReplicaError(f"replicas differ at iteration {iteration}: {'; '.join(texts)}. {self._advice()}")

    def _advice(self) -> str:
        sound = "no checkpoint of this job was written after a comparison that found them alike"
        if self._last_alike is not None:
            sound = f"they were alike at iteration {self._last_alike}: checkpoints up to it are sound"
        return (
            "Memory or a device has failed without an error, or ranks did not do the same. Leave the named machine out "
            f"and go on from an earlier checkpoint (--resume checkpoint.ckpt_step=N); {sound}"
        )


def _stored(name: str, parameter: Tensor) -> dict[str, Tensor]:
    """The tensors that a parameter consists of: itself, or what TE keeps of a quantized one."""
    if not hasattr(parameter, "_quantizer"):
        return {name: parameter}
    parts = {inner: getattr(parameter, inner, None) for inner in _STORED}
    return {f"{name}.{inner}": part for inner, part in parts.items() if isinstance(part, Tensor)}
