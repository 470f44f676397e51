"""Whole training runs of a small model on real ranks in which one rank's numbers go wrong at a chosen step.

What goes wrong is put in from outside, where it would come from: into a gradient before ranks add theirs up, or into a
rank's loss. The loop, the way back and the checkpoints are the product's.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fp8.config.schema import Config
from tests.checkpoint.training import Memory, Samples, checkpoint_config, derived_layout, state_hashes
from tests.small_run import VOCAB_SIZE

STEPS, BATCH = 8, 4


def faulty_config(**sections: dict[str, Any]) -> Config:
    """Eight steps of four samples, a checkpoint every two."""
    base: dict[str, dict[str, Any]] = {
        "training": {"train_iters": STEPS, "eval_interval": 0, "eval_iters": 0},
        "checkpoint": {"save_interval": 2},
        "optimizer": {"lr_decay_iters": STEPS},
    }
    for name, values in sections.items():
        base.setdefault(name, {}).update(values)
    return checkpoint_config(**base)


@dataclass(frozen=True)
class Outcome:
    """One rank of a run: hashes of its whole state, what was recorded, which samples it read, how it ended."""

    state: dict[str, str]
    records: list[dict[str, Any]]
    samples: list[int]
    error: str
    reopened: list[int] = field(default_factory=list)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The records of a kind."""
        return [record for record in self.records if record["event"] == kind]


@dataclass(frozen=True)
class LaterSamples:
    """Samples from which `hole` was cut out: what comes behind it takes its numbers. Remembers what was asked."""

    samples: Any
    hole: range
    asked: list[int] = field(default_factory=list)

    def __getitem__(self, index: int) -> dict[str, Any]:
        shifted = index if index < self.hole.start else index + len(self.hole)
        self.asked.append(shifted)
        return self.samples[shifted]


@dataclass(frozen=True)
class LearnableSamples:
    """Counting up, which is soon learnt; samples in `poisoned` are random tokens."""

    seq_length: int
    poisoned: range = range(0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        if index in self.poisoned:
            return Samples(self.seq_length)[index]
        return _sample((torch.arange(self.seq_length + 1) + 7 * index) % 16)


@dataclass(frozen=True)
class TextSamples:
    """Stretches of the source of a module, a token a byte."""

    seq_length: int

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode("ascii", "ignore")), dtype=torch.uint8)
        start = 997 * index % (len(text) - self.seq_length - 1)
        return _sample(text[start : start + self.seq_length + 1].long())


def _sample(tokens: Any) -> dict[str, Any]:
    """What a dataset gives of `[s + 1]` tokens, all of which count."""
    import torch

    length = len(tokens) - 1
    return {
        "tokens": tokens[:-1],
        "labels": tokens[1:],
        "loss_mask": torch.ones(length),
        "position_ids": torch.arange(length),
    }


@dataclass(frozen=True)
class Fault:
    """NaN on `rank` in the steps numbered `steps`, counted over all that this process makes, from 1 on.

    `where`: "gradient" of `parameter`, of the rank's first chunk, or "loss".
    """

    rank: int
    steps: Collection[int]
    where: str = "gradient"
    parameter: str = "layers.0.layernorm_mlp.fc1_weight"

    def put_into(self, parts: Any) -> None:
        """From now on these steps go wrong."""
        if parts.groups.rank != self.rank:
            return
        count = [0]
        passes = parts.stepper._forward_backward
        config = parts.chunks[0].module.config
        finalize = config.finalize_model_grads_func

        def counted_passes(*arguments: Any, **named: Any) -> Any:
            # Evaluations are passes too.
            count[0] += not named["forward_only"]
            loss = passes(*arguments, **named)
            if self.where == "loss" and not named["forward_only"] and count[0] in self.steps:
                loss.sum_and_tokens[0] = float("nan")
            return loss

        def spoilt(*arguments: Any, **named: Any) -> None:
            if self.where == "gradient" and count[0] in self.steps:
                gradient = dict(parts.chunks[0].module.named_parameters())[self.parameter].main_grad
                gradient.view(-1)[3] = float("inf")
            finalize(*arguments, **named)

        parts.stepper._forward_backward = counted_passes
        config.finalize_model_grads_func = spoilt


def train_on_this_rank(
    config: Config,
    checkpoints: Path | None = None,
    fault: Fault | None = None,
    hole: range = range(0),
    resume: bool = False,
    last_step: int | None = None,
    samples: Any = None,
    overridden: Callable[[Any], None] | None = None,
) -> Outcome:
    """Train in the running world, going back as often as needed.

    `hole`: samples that the order lacks. `resume`: from the latest of `checkpoints`. `last_step`: the process is gone
    when it has made so many, without saving.
    """
    from megatron_fp8 import device as devices
    from megatron_fp8.checkpoint.directory import CheckpointDirectory
    from megatron_fp8.config.run_start import START, Position, samples_needed
    from megatron_fp8.data.dataset import Datasets
    from megatron_fp8.faults.exit_codes import NonFiniteError, RollbackError
    from megatron_fp8.report.record import Recorder
    from megatron_fp8.report.start_clock import StartClock
    from megatron_fp8.train.rollback import train_to_the_end
    from megatron_fp8.train.setup import build_parts
    from megatron_fp8.train.step import IntervalLoss

    memory = Memory([])
    reopened: list[int] = []
    parts = build_parts(config, derived_layout(config), VOCAB_SIZE, devices.prepare(), Recorder([memory]), checkpoints)
    order = LaterSamples(samples or Samples(config.model.seq_length), hole)

    def datasets_from(position: Position) -> Datasets:
        return Datasets(order, (), samples_needed(config.training, position))

    progress, position = None, START
    if resume:
        assert checkpoints is not None
        directory = CheckpointDirectory(checkpoints)
        latest = directory.latest()
        assert latest is not None
        interval = IntervalLoss(parts.device.torch_device)
        progress, notes = parts.checkpointer.load(directory.path(latest), interval, weights_only=False)
        assert notes == []
        position = progress.state.position
    if fault is not None:
        fault.put_into(parts)
    if last_step is not None:
        _end_after(parts, last_step)
    if overridden is not None:
        overridden(parts)
    error = ""
    try:
        train_to_the_end(parts, datasets_from(position), StartClock(), progress, datasets_from, reopened.append)
    except (NonFiniteError, RollbackError, GoneError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Outcome(state_hashes(parts), memory.records, order.asked, error, reopened)


class GoneError(Exception):
    """The process is gone."""


def _end_after(parts: Any, last_step: int) -> None:
    step, count = parts.stepper.train, [0]

    def counted(*arguments: Any, **named: Any) -> Any:
        count[0] += 1
        if count[0] > last_step:
            raise GoneError
        return step(*arguments, **named)

    parts.stepper.train = counted
