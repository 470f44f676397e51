"""Owns what a run does about a step that went wrong: one whose loss or gradients are not finite, or a loss spike.

Every rank knows the same loss and the same gradient norm, so that all decide alike without asking each other. Must not
know how a run goes back to a checkpoint.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed

from megatron_fp8.faults.bad_step import RankFinding, describe_findings
from megatron_fp8.faults.exit_codes import NonFiniteError
from megatron_fp8.faults.spike import RecentLosses, SpikeDetector
from megatron_fp8.model.build import global_parameters
from megatron_fp8.train.parts import TrainingParts
from megatron_fp8.train.state import TrainState
from megatron_fp8.train.step import LossSum, StepResult

_ADVICE = "Lower optimizer.lr, lengthen optimizer.lr_warmup_iters, or look at the data of this step"


@dataclass(frozen=True)
class Rewind:
    """The run has to go back to a checkpoint, and on from behind the samples of the bad steps.

    `newest_iteration`: of checkpoints that may be taken. With the weights of such a one a later step had a normal loss;
    the weights of the step right before the bad ones are the first that may be bad. `reached`: after the last bad step.
    """

    reason: str
    newest_iteration: int
    reached: TrainState


def judge(parts: TrainingParts, recent: RecentLosses, state: TrainState, result: StepResult) -> Rewind | None:
    """What follows from a step: nothing, a record, the way back, or the run's end, by NonFiniteError.

    `recent`: losses before the step. `state`: after the step. Collective over all ranks at a step that is not finite.
    """
    if result.nonfinite:
        return _nonfinite(parts, state, result)
    policy = parts.config.faults.spike
    if policy == "off" or result.skipped or result.mean_loss is None:
        return None
    spike = SpikeDetector(parts.config.faults).observe(recent, state.iteration, result.mean_loss)
    if spike is None:
        return None
    values = {"iteration": state.iteration, "began": spike.began, "lm loss": spike.loss, "limit": spike.limit}
    parts.recorder.write("spike", {**values, "median": spike.median, "reason": str(spike)})
    return Rewind(str(spike), spike.began - 2, state) if policy == "rewind" else None


def _nonfinite(parts: TrainingParts, state: TrainState, result: StepResult) -> Rewind | None:
    settings = parts.config.faults
    reason = _what_is_not_finite(parts, state, result)
    if settings.nonfinite == "stop":
        raise NonFiniteError(f"{reason}. {_ADVICE}")
    if settings.nonfinite == "rewind":
        return Rewind(reason, state.iteration - 2, state)
    for key, count, most in (
        ("nonfinite_max_skips_in_a_row", state.nonfinite_skips_in_a_row, settings.nonfinite_max_skips_in_a_row),
        ("nonfinite_max_skips", state.nonfinite_skips, settings.nonfinite_max_skips),
    ):
        if count > most:
            raise NonFiniteError(f"{reason}. It would be the {count}. to be left out; faults.{key}={most}. {_ADVICE}")
    values = {"iteration": state.iteration, "lm loss": result.mean_loss, "grad-norm": result.grad_norm}
    counts = {"skips in a row": state.nonfinite_skips_in_a_row, "skips": state.nonfinite_skips}
    parts.recorder.write("skip", {**values, **counts, "reason": reason})
    return None


def _what_is_not_finite(parts: TrainingParts, state: TrainState, result: StepResult) -> str:
    """The numbers of a step and where they come from; collective over all ranks."""
    findings: list[RankFinding | None] = [None] * parts.groups.world_size
    torch.distributed.all_gather_object(findings, _on_this_rank(parts, result.loss))
    where = describe_findings([each for each in findings if each is not None], parts.groups.dp.size())
    last = state.consumed_samples
    first = last - parts.config.training.global_batch_size
    return (
        f"lm loss is {result.mean_loss}, grad-norm is {result.grad_norm} at iteration {state.iteration} "
        f"(samples {first} to {last - 1}), with NaN or infinity in {where}"
    )


def _on_this_rank(parts: TrainingParts, loss: LossSum) -> RankFinding:
    groups = parts.groups
    place = f"rank {groups.rank} (tp {groups.tp.rank()}, pp {groups.pp.rank()}, dp {groups.dp.rank()})"
    gradients = [
        (name, parameter.main_grad)  # type: ignore[attr-defined]
        for name, parameter in global_parameters(parts.chunks)
        if parameter.requires_grad
    ]
    finite = torch.stack([torch.isfinite(gradient).all() for _, gradient in gradients]).tolist()
    names = tuple(name for (name, _), is_finite in zip(gradients, finite, strict=True) if not is_finite)
    return RankFinding(place, not math.isfinite(loss.sum_and_tokens[0].item()), names)
