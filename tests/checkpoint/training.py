"""Whole training runs of a small model on real ranks, with checkpoints, and everything that their state consists of.

The loop is the product's. The state is read from where Megatron and Transformer Engine keep it, not by the code that
saves it, and every byte of it counts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fp8.config.run_start import Position, samples_needed
from megatron_fp8.config.schema import Config
from tests.small_run import VOCAB_SIZE, small_config

STEPS_BEFORE, STEPS = 3, 6


class _TimesAndMachine:
    """Names of what a run records of time and of this machine."""

    _NAME = re.compile(
        r".*(time|seconds|second|seconds-left|slowest-rank)(/.*)?|.*-wait-.*|.*-memory-.*|.*(-gpu|/measured)"
        r"|throughput|node/.*"
    )

    def __contains__(self, name: str) -> bool:
        return self._NAME.fullmatch(name) is not None


NOT_COMPARED = _TimesAndMachine()
_SERIES = ("train", "validation", "norms", "fp8", "fp8-check", "fp8-fallback")


def checkpoint_config(**sections: dict[str, Any]) -> Config:
    """Two layers, six steps, a checkpoint after the third; a record every two steps, so that one spans the save."""
    base: dict[str, dict[str, Any]] = {
        "model": {"num_layers": 2, "seq_length": 16},
        "training": {
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "train_iters": STEPS,
            "eval_interval": 4,
            "eval_iters": 1,
        },
        "optimizer": {"lr_warmup_iters": 4, "min_lr": 1e-4},
        "checkpoint": {"save_interval": STEPS_BEFORE},
        "logging": {"log_interval": 2},
    }
    for name, values in sections.items():
        base.setdefault(name, {}).update(values)
    return small_config(**base)


@dataclass(frozen=True)
class Trained:
    """One rank of a run that ended: hashes of its whole state by name, what was recorded, which samples it read."""

    state: dict[str, str]
    records: list[dict[str, Any]]
    samples: list[int]
    notes: list[str] = field(default_factory=list)
    probe: Any = None

    def series(self, after: int = 0) -> list[dict[str, Any]]:
        """What was recorded of steps after `after`, without times."""
        return [
            {name: value for name, value in record.items() if name not in NOT_COMPARED}
            for record in self.records
            if record["event"] in _SERIES and record["iteration"] > after
        ]


@dataclass(frozen=True)
class Memory:
    """A view of the record that keeps it."""

    records: list[dict[str, Any]]

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(dict(record))

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Samples:
    """Sample `index` is the same random tokens whoever asks; remembers who asked for what."""

    seq_length: int
    asked: list[int] = field(default_factory=list)

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        self.asked.append(index)
        generator = torch.Generator().manual_seed(1000 + index)
        tokens = torch.randint(0, VOCAB_SIZE, (self.seq_length + 1,), generator=generator)
        mask = (torch.rand(self.seq_length, generator=generator) > 0.2).float()
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": mask,
            "position_ids": torch.arange(self.seq_length),
        }


def train_on_this_rank(
    config: Config,
    checkpoints: Path | None = None,
    load: Path | None = None,
    weights_only: bool = False,
    before: Callable[[Any], None] | None = None,
    probe: Callable[[Any], Any] | None = None,
    profiles: Path | None = None,
) -> Trained:
    """Train to the end in the running world, saving into `checkpoints`, starting from the checkpoint `load`.

    `profiles`: the directory of traces.

    `before(parts)` is called before training; `probe(parts)` right after loading, or without `load` right before the
    first save.
    """
    from megatron_fp8 import device as devices
    from megatron_fp8.data.dataset import Datasets
    from megatron_fp8.data.validation import ValidationSet
    from megatron_fp8.report.record import Recorder
    from megatron_fp8.report.start_clock import StartClock
    from megatron_fp8.train.loop import train
    from megatron_fp8.train.setup import build_parts
    from megatron_fp8.train.step import IntervalLoss

    memory, layout = Memory([]), derived_layout(config)
    device = devices.prepare()
    parts = build_parts(config, layout, VOCAB_SIZE, device, Recorder([memory]), checkpoints, profiles)
    training = config.training
    samples = Samples(config.model.seq_length)
    num_valid = training.eval_iters * training.global_batch_size
    valid = ValidationSet(None, Samples(config.model.seq_length), num_valid)
    progress, notes, position = None, [], Position()
    if load is not None:
        progress, notes = parts.checkpointer.load(load, IntervalLoss(parts.device.torch_device), weights_only)
        position = Position(progress.state.iteration, progress.state.consumed_samples)
    datasets = Datasets(samples, (valid,) if num_valid else (), samples_needed(training, position))
    if before is not None:
        before(parts)
    probed: list[Any] = [probe(parts)] if probe is not None and load is not None else []
    if probe is not None and load is None:
        _probe_before_saving(parts, lambda: probed.append(probe(parts)))
    train(parts, datasets, StartClock(), progress)
    return Trained(state_hashes(parts), memory.records, samples.asked, notes, probed[0] if probed else None)


def _probe_before_saving(parts: Any, probe: Callable[[], None]) -> None:
    after_step = parts.checkpointer.after_step

    def probe_and_go_on(progress: Any, stops: bool) -> None:
        if progress.state.iteration == STEPS_BEFORE:
            probe()
        after_step(progress, stops)

    parts.checkpointer.after_step = probe_and_go_on


def save_on_this_rank(
    config: Config, checkpoints: Path, iterations: Sequence[int], before_each: Callable[[int], None] | None = None
) -> list[str]:
    """Save checkpoints of these iterations in the running world, without training; weights and moments depend on them.

    `before_each(iteration)` is called before each. Returns what was raised, by iteration; empty texts: nothing.
    """
    from megatron_fp8 import device as devices
    from megatron_fp8.checkpoint.manifest import CheckpointError
    from megatron_fp8.optim.state import NAMES, allocate_state, state_parts
    from megatron_fp8.report.record import Recorder
    from megatron_fp8.train.checkpointing import Progress
    from megatron_fp8.train.setup import build_parts
    from megatron_fp8.train.state import TrainState
    from megatron_fp8.train.step import IntervalLoss

    parts = build_parts(config, derived_layout(config), VOCAB_SIZE, devices.prepare(), Recorder([]), checkpoints)
    allocate_state(parts.optimizer)
    raised = []
    for iteration in iterations:
        for part in state_parts(parts.optimizer):
            for number, name in enumerate(NAMES):
                part.read(name).fill_(iteration + number / 4)
        state = TrainState(iteration, 8 * iteration, 8 * 16 * iteration)
        progress = Progress(state, IntervalLoss(parts.device.torch_device), None)
        try:
            if before_each is not None:
                before_each(iteration)
            parts.checkpointer.after_step(progress, stops=True)
            raised.append("")
        except CheckpointError as error:
            raised.append(str(error))
    return raised


def derived_layout(config: Config) -> Any:
    """The layout of `config` on the running world's ranks."""
    import torch

    from megatron_fp8.config.layout import derive_layout

    return derive_layout(config, torch.distributed.get_world_size(), VOCAB_SIZE)


def state_hashes(parts: Any) -> dict[str, str]:
    """SHA-256 of every tensor and number that the next step depends on, by name."""
    return {name: _hash(value) for name, value in whole_state(parts)}


def whole_state(parts: Any) -> Iterator[tuple[str, Any]]:
    """(name, tensor or number): weights, the optimizers' raw state, scaling state, generators, schedule, decisions."""
    import torch
    from megatron.core import tensor_parallel

    for index, chunk in enumerate(parts.chunks):
        for name, parameter in chunk.named_parameters():
            quantized = hasattr(parameter, "_quantizer")
            yield f"chunk{index}.{name}", parameter.dequantize() if quantized else parameter
            for inner in ("_data", "_rowwise_data", "_scale_inv", "_rowwise_scale_inv"):
                if quantized and isinstance(getattr(parameter, inner, None), torch.Tensor):
                    yield f"chunk{index}.{name}.{inner}", getattr(parameter, inner)
        for name, module in chunk.named_modules():
            # TE's attention has state of this kind too, which nothing uses outside of FP8 attention.
            if name.endswith("core_attention"):
                continue
            for direction in ("scaling_fwd", "scaling_bwd"):
                scaling = getattr(module, "fp8_meta", {}).get(direction)
                for tensor in ("scale", "amax_history"):
                    if scaling is not None and getattr(scaling, tensor, None) is not None:
                        yield f"chunk{index}.{name}.{direction}.{tensor}", getattr(scaling, tensor)
    yield from _optimizer_state(parts.optimizer)
    yield "schedule", parts.schedule.num_steps
    yield "num_updates", parts.precision._scales.num_updates
    yield "fallback", str(parts.health.state_dict())
    yield "generator", torch.get_rng_state()
    for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        yield f"generator.{name}", state


def _optimizer_state(optimizer: Any) -> Iterator[tuple[str, Any]]:
    for number, inner in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        if inner.is_stub_optimizer:
            continue
        adam = inner.optimizer
        for group_number, group in enumerate(adam.param_groups):
            where = f"optimizer{number}.group{group_number}"
            for name in ("step", "lr", "weight_decay"):
                yield f"{where}.{name}", group.get(name, 0)
            for order, main in enumerate(group["params"]):
                yield f"{where}.{order}.main", main
                for name, value in sorted(adam.state[main].items()):
                    yield f"{where}.{order}.{name}", value
                for name, value in sorted(getattr(adam, "_scales", {}).get(main, {}).items()):
                    yield f"{where}.{order}.{name}.scale", value
        scaler = getattr(inner, "grad_scaler", None)
        if scaler is not None:
            yield f"optimizer{number}.scaler", str({name: float(value) for name, value in scaler.state_dict().items()})


def _hash(value: Any) -> str:
    import torch

    if not isinstance(value, torch.Tensor):
        return repr(value)
    if hasattr(value, "_quantizer"):
        return f"{_hash(value._data)} {_hash(value._scale_inv)}"
    plain = value.detach().contiguous().reshape(-1)
    content = plain.view(torch.uint8).cpu().numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
