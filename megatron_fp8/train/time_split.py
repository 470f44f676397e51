"""Owns the parts that the time of a step is made of: from spans of every rank to series. Imports no torch.

Parts add up to `iteration-time`, the mean over ranks; `NAME/...` are what a part is made of. Must not know how spans
are measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from megatron_fp8.train import step_times as spans


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a mean step of an interval on one rank.

    `data`: waiting for batches. `forward`, `backward`: this rank's passes, with the collectives inside them.
    `waiting`: of the pipeline schedule, when none of them runs. `gradients`: reducing gradients, as far as it is not
    hidden behind the backward pass. `optimizer`: its step, `parameters` (their gathering) and
    `scales` (those of FP8) included. `whole`: all of the step. `own`: work that waits for no other rank, as far as it
    can be told: passes without collectives, else parts of them.
    """

    data: float
    forward: float
    backward: float
    waiting: float
    gradients: float
    optimizer: float
    parameters: float
    scales: float
    whole: float
    own: float = 0.0

    @classmethod
    def of(cls, seconds: Mapping[str, float], whole: float, num_steps: int) -> RankTimes:
        """From the seconds of all spans of an interval of `num_steps` steps that took `whole` seconds.

        A batch is fetched in a forward pass; the schedule holds the passes and reduces the gradients at its end.
        """
        each = {name: seconds.get(name, 0.0) / num_steps for name in spans.MEASURED}
        passes = each[spans.FORWARD] + each[spans.BACKWARD]
        return cls(
            data=each[spans.DATA],
            forward=each[spans.FORWARD] - each[spans.DATA],
            backward=each[spans.BACKWARD],
            waiting=each[spans.FORWARD_BACKWARD] - passes - each[spans.GRADIENTS],
            gradients=each[spans.GRADIENTS],
            optimizer=each[spans.OPTIMIZER],
            parameters=each[spans.PARAMETERS],
            scales=each[spans.SCALES],
            whole=whole / num_steps,
            own=each[spans.OWN_WORK] or passes - each[spans.DATA],
        )

    @property
    def compute(self) -> float:
        """Seconds of passes."""
        return self.forward + self.backward

    @property
    def forward_backward(self) -> float:
        """Seconds of the pipeline schedule without data and gradients."""
        return self.compute + self.waiting

    def values(self) -> list[float]:
        """Its numbers, to be gathered; `RankTimes(*values)` is the way back."""
        return [getattr(self, field.name) for field in fields(self)]


def time_series(ranks: Sequence[RankTimes], fp8: bool, several_stages: bool) -> dict[str, float]:
    """Series of an interval from the times of all ranks, in their order."""
    mean = RankTimes(*(fmean(column) for column in zip(*(rank.values() for rank in ranks), strict=True)))
    known = mean.data + mean.forward_backward + mean.gradients + mean.optimizer
    compute = [rank.compute for rank in ranks]
    series = {
        "iteration-time": mean.whole,
        "batch-generator-time": mean.data,
        "forward-backward-time": mean.forward_backward,
        "forward-backward-time/forward": mean.forward,
        "forward-backward-time/backward": mean.backward,
        "forward-backward-time/waiting": mean.waiting,
        "all-grads-sync-time": mean.gradients,
        "optimizer-time": mean.optimizer,
        "optimizer-time/params-all-gather": mean.parameters,
        **({"optimizer-time/fp8-scale-update": mean.scales} if fp8 else {}),
        "other-time": mean.whole - known,
        "compute-time/fastest-rank": min(compute),
        "compute-time/slowest-rank": max(compute),
        "slowest-rank": compute.index(max(compute)),
    }
    if several_stages and mean.forward_backward > 0:
        series["pipeline-bubble/measured"] = mean.waiting / mean.forward_backward
    return series
