"""Owns one run of the project's own training step in one mode: the parts of `train/setup.py` on prepared samples."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from benchmarks.formats.samples import Samples
from benchmarks.formats.work import OperandNoise
from megatron_fp8 import device as devices
from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.schema import Config
from megatron_fp8.parallel.process_group import init_process_group
from megatron_fp8.report.library_warnings import hide_meaningless_warnings
from megatron_fp8.report.record import Recorder

# Names of this project's linear layers, and the short ones of the comparison.
_LINEARS = {
    "self_attention.layernorm_qkv": "qkv",
    "self_attention.proj": "proj",
    "layernorm_mlp.fc1": "fc1",
    "layernorm_mlp.fc2": "fc2",
}


class OurRun:
    """A world of one rank; `step` is called once for each step of the config."""

    def __init__(self, config: Config, samples: Samples) -> None:
        device = devices.prepare()
        hide_meaningless_warnings(device.emulated)
        # They look for CUDA when imported.
        from megatron_fp8.train.setup import build_parts

        if not torch.distributed.is_initialized():
            init_process_group(device.collective_backend, config.parallel.distributed_timeout_minutes)
        layout = derive_layout(config, 1, None)
        self.num_parameters = layout.num_parameters
        self._parts = build_parts(config, layout, layout.vocab_size, device, Recorder([]))
        self._loader = self._parts.batches.loader(samples, len(samples))
        self._iterators = self._loader.iterators(len(self._parts.chunks))
        self.operands: dict[str, OperandNoise] = {}

    def step(self, *, measure: bool) -> tuple[float, bool]:
        """Mean loss in nats per token before the step, and whether it was skipped; `measure`: look at operands."""
        from megatron_fp8.precision.probe import TensorProbe

        parts = self._parts
        probe = TensorProbe(parts.precision.layers) if measure and parts.precision.policy.fp8 is not None else None
        with probe.measuring() if probe is not None else nullcontext():
            result = parts.stepper.train(parts.optimizer, self._iterators, parts.batches.shape)
        if not result.skipped:
            parts.schedule.step(1)
        if probe is not None:
            self.operands = {
                _short_name(name): OperandNoise(health.sqnr_db, health.clipped, health.flushed)
                for name, health in probe.read().items()
            }
        return result.loss.reduced_mean(), result.skipped

    def close(self) -> None:
        """End the loader's threads."""
        self._loader.close()


def _short_name(name: str) -> str:
    """`layers.0/self_attention.layernorm_qkv/input` -> `layers.0/qkv/input`."""
    layer, linear, kind = name.split("/")
    return f"{layer}/{_LINEARS[linear]}/{kind}"
