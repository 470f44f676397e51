"""What a rank is doing right now, as the training loop says: its step, its phase, a count that grows as it advances.

Written by the loop and the spans of a step, read by the watchdog's threads. Costs one small object a phase.
"""

import time
from dataclasses import dataclass
from enum import Enum

from megatron_fp8.train.step_times import BACKWARD, DATA, FORWARD, OPTIMIZER


class Phase(str, Enum):
    """What a rank does."""

    START = "start"
    """Until training begins: loading, the first evaluation."""
    DATA = "data"
    FORWARD_BACKWARD = "forward-backward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    PROFILE = "profile"


# Whose length depends on disks, compilers and the model's size, not on the step.
_SLOW = (Phase.START, Phase.CHECKPOINT, Phase.PROFILE)
_PHASE_OF_SPAN = {
    DATA: Phase.DATA,
    FORWARD: Phase.FORWARD_BACKWARD,
    BACKWARD: Phase.FORWARD_BACKWARD,
    OPTIMIZER: Phase.OPTIMIZER,
}
_PASSES = (Phase.FORWARD_BACKWARD, Phase.EVALUATION)


@dataclass(frozen=True)
class Beat:
    """One sign of life. `slow`: it may take long; `at`: seconds on this process's monotonic clock."""

    count: int
    iteration: int
    phase: Phase
    slow: bool
    at: float


class Heartbeat:
    """The newest sign of life of this rank. The first step may take long, since it compiles and connects.

    `passes`: what forward passes are of now, training or evaluation.
    """

    def __init__(self) -> None:
        self._first_step_done = False
        self.passes = Phase.FORWARD_BACKWARD
        self.beat = Beat(0, 0, Phase.START, True, time.monotonic())

    def enter(self, phase: Phase, iteration: int | None = None) -> None:
        """This rank begins `phase`, of the step that ends with `iteration` steps done (None: the same step)."""
        if phase in _PASSES:
            self.passes = phase
        last = self.beat
        slow = phase in _SLOW or not self._first_step_done
        step = last.iteration if iteration is None else iteration
        # One assignment: a reader in another thread sees the whole beat or the one before.
        self.beat = Beat(last.count + 1, step, phase, slow, time.monotonic())

    def on_span(self, name: str, begins: bool) -> None:
        """A span of a step begins or ends: each micro-batch's passes count as progress, in evaluations too."""
        phase = _PHASE_OF_SPAN.get(name)
        if phase is None or (not begins and phase is not Phase.DATA):
            return
        # The schedule's passes are of training or of evaluation, as was said before.
        self.enter(phase if begins and phase is not Phase.FORWARD_BACKWARD else self.passes)

    def step_done(self) -> None:
        """A step is done: from now on steps have their ordinary length."""
        self._first_step_done = True
