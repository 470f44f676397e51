"""Decides what a run does about a step that went wrong: a loss or gradients that are not finite, or a loss spike.

Every rank knows the same loss and gradient norm, so all decide alike without asking each other. Must not know how a run
rolls back to a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_fp8.config.schema import Config
from megatron_fp8.faults.exit_codes import NonFiniteError
from megatron_fp8.model.build import global_parameters
from megatron_fp8.monitors.protocol import Event
from megatron_fp8.monitors.spike import RecentLosses, SpikeDetector
from megatron_fp8.parallel.groups import ParallelGroups
from megatron_fp8.parallel.object_collectives import all_gather
from megatron_fp8.train.state import TrainState
from megatron_fp8.train.step import LossSum, StepResult

_ADVICE = "Lower optimizer.lr, lengthen optimizer.lr_warmup_iters, or look at the data of this step"
_MAX_RANKS, _MAX_NAMES = 4, 3


@dataclass(frozen=True)
class Rollback:
    """The run has to roll back to a checkpoint and continue after the samples of the bad steps.

    `newest_iteration`: of checkpoints that may be loaded. A later step had a normal loss with the weights of such a
    one; the weights right before the bad steps are the first that may be bad. `reached`: after the last bad step.
    """

    reason: str
    newest_iteration: int
    reached: TrainState


@dataclass(frozen=True)
class Verdict:
    """What follows from a step: an event to record and a rollback, where there is one."""

    event: Event | None = None
    rollback: Rollback | None = None


class StepJudge:
    """Judges every step by the policies of the config's `faults`."""

    def __init__(self, config: Config, groups: ParallelGroups, chunks: Sequence[DistributedDataParallel]) -> None:
        self._settings = config.faults
        self._global_batch_size = config.training.global_batch_size
        self._groups = groups
        self._chunks = chunks
        self._detector = None if config.faults.spike == "off" else SpikeDetector(config.faults)

    def judge(self, recent: RecentLosses, state: TrainState, result: StepResult) -> Verdict:
        """What follows from a step, if not the run's end, by NonFiniteError.

        `recent`: losses before the step. `state`: after it. Collective over all ranks at a step that is not finite.
        """
        if result.nonfinite:
            return self._nonfinite(state, result)
        if self._detector is None or result.skipped or result.mean_loss is None:
            return Verdict()
        spike = self._detector.observe(recent, state.iteration, result.mean_loss)
        if spike is None:
            return Verdict()
        values = {"iteration": state.iteration, "began": spike.began, "lm loss": spike.loss, "limit": spike.limit}
        event: Event = ("spike", {**values, "median": spike.median, "reason": str(spike)})
        return Verdict(
            event, Rollback(str(spike), spike.began - 2, state) if self._settings.spike == "rewind" else None
        )

    def _nonfinite(self, state: TrainState, result: StepResult) -> Verdict:
        settings = self._settings
        reason = self._describe(state, result)
        if settings.nonfinite == "stop":
            raise NonFiniteError(f"{reason}. {_ADVICE}")
        if settings.nonfinite == "rewind":
            return Verdict(rollback=Rollback(reason, state.iteration - 2, state))
        for key, count, limit in (
            ("nonfinite_max_skips_in_a_row", state.nonfinite_skips_in_a_row, settings.nonfinite_max_skips_in_a_row),
            ("nonfinite_max_skips", state.nonfinite_skips, settings.nonfinite_max_skips),
        ):
            if count > limit:
                raise NonFiniteError(
                    f"{reason}. This step would be skip number {count}, and faults.{key}={limit}. {_ADVICE}"
                )
        values = {"iteration": state.iteration, "lm loss": result.mean_loss, "grad-norm": result.grad_norm}
        counts = {"skips in a row": state.nonfinite_skips_in_a_row, "skips": state.nonfinite_skips}
        return Verdict(("skip", {**values, **counts, "reason": reason}))

    def _describe(self, state: TrainState, result: StepResult) -> str:
        """The numbers of a step and where they come from; collective over all ranks."""
        where = describe_findings(all_gather(self._on_this_rank(result.loss)), self._groups.dp.size())
        last = state.consumed_samples
        first = last - self._global_batch_size
        return (
            f"lm loss is {result.mean_loss}, grad-norm is {result.grad_norm} at iteration {state.iteration} "
            f"(samples {first} to {last - 1}); NaN or infinity {where}"
        )

    def _on_this_rank(self, loss: LossSum) -> RankFinding:
        groups = self._groups
        place = f"rank {groups.rank} (tp {groups.tp.rank()}, pp {groups.pp.rank()}, dp {groups.dp.rank()})"
        gradients = [
            (name, parameter.main_grad)  # type: ignore[attr-defined]
            for name, parameter in global_parameters(self._chunks)
            if parameter.requires_grad
        ]
        finite = torch.stack([torch.isfinite(gradient).all() for _, gradient in gradients]).tolist()
        names = tuple(name for (name, _), is_finite in zip(gradients, finite, strict=True) if not is_finite)
        return RankFinding(place, not math.isfinite(loss.sum_and_tokens[0].item()), names)


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
            named = ", ".join(self.gradients[:_MAX_NAMES])
            more = len(self.gradients) - _MAX_NAMES
            found.append(f"the gradients of {named}{f' and {more} more' if more > 0 else ''}")
        return f"on {self.place}: {' and '.join(found)}"


def describe_findings(findings: Sequence[RankFinding], data_parallel_size: int) -> str:
    """Where NaN or infinity is, in a line; `findings` has one for each rank."""
    found = [each for each in findings if each.loss or each.gradients]
    if not found:
        return "only in the sum over all ranks"
    # A loss belongs to a rank's own samples, so it shows where it began.
    found.sort(key=lambda each: not each.loss)
    text = "; ".join(map(str, found[:_MAX_RANKS]))
    if len(found) > _MAX_RANKS:
        text += f"; and {len(found) - _MAX_RANKS} more ranks"
    if data_parallel_size > 1 and any(each.gradients for each in found):
        text += " (gradients are checked after their reduction over data-parallel ranks)"
    return text
