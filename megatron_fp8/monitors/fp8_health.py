"""Decides when FP8 tensors are measured, records them, and applies decisions to fall back to BF16.

Scales and amaxes at the log interval, which costs no pass over the data; what quantization lost, from the data, at the
longer health interval. Every rank takes part and knows the numbers of all stages, so that all decide alike and any of
them can save the decisions, which take effect between two steps. Must not know how tensors are measured or decisions
are made.

Measured on the CPU stand-in with delayed scaling, steps interleaved, one thread, CPU time beside a plain step: with a
check 1.34 (small test model) and 1.36 (configs/r1.yaml, one micro-batch), so 0.4 % at an interval of 100 steps; with
the scales of a log interval no difference was seen above the noise of 5 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from megatron_fp8.monitors.protocol import Event, Monitor
from megatron_fp8.parallel.groups import ParallelGroups
from megatron_fp8.parallel.object_collectives import all_gather
from megatron_fp8.precision.fallback import Change, FallbackDecider
from megatron_fp8.precision.manager import PrecisionManager
from megatron_fp8.precision.operand_scales import (
    OperandScale,
    ScaleWatcher,
    delayed_scales,
    seed_delayed_scales,
)
from megatron_fp8.precision.operands import Operand, layer_number, operands
from megatron_fp8.precision.policy import Fp8Policy
from megatron_fp8.precision.probe import TensorProbe
from megatron_fp8.precision.tap import tap
from megatron_fp8.precision.te_recipe import fresh_quantizer
from megatron_fp8.precision.tensor_health import TensorHealth
from megatron_fp8.report.record import Value

T = TypeVar("T")


class Fp8HealthMonitor(Monitor):
    """Watches the FP8 tensors of a run; does nothing in other modes."""

    def __init__(self, precision: PrecisionManager, groups: ParallelGroups, log_interval: int) -> None:
        self._precision = precision
        self._groups = groups
        self._log_interval = log_interval
        fp8 = precision.policy.fp8
        self._decider = FallbackDecider(fp8.health) if fp8 is not None and fp8.health.fallback else None
        # Of the step under way.
        self._probe: TensorProbe | None = None
        self._scales: ScaleWatcher | None = None

    @contextmanager
    def before_step(self, iteration: int) -> Iterator[None]:
        """Measures while the step runs."""
        fp8 = self._precision.policy.fp8
        if fp8 is None:
            yield
            return
        checks = fp8.health.interval > 0 and iteration % fp8.health.interval == 0
        self._probe = self._new_probe(fp8) if checks else None
        watches = self._is_logged(iteration) and fp8.recipe != "delayed"
        self._scales = ScaleWatcher(self._operands(), fp8) if watches else None
        with ExitStack() as stack:
            if self._probe is not None:
                stack.enter_context(self._probe.measuring())
            if self._scales is not None:
                stack.enter_context(tap(self._scales))
            yield

    def after_step(self, iteration: int, updated: bool) -> Iterator[Event]:
        """Scales, what quantization lost, and the layers that fall back or return."""
        del updated
        fp8 = self._precision.policy.fp8
        if fp8 is None:
            return
        if self._is_logged(iteration):
            group, scales = self._groups.tp_dp, self._scales
            seen = delayed_scales(self._operands(), fp8, group) if scales is None else scales.read(group)
            yield from self._scale_events(iteration, self._of_all_stages(seen))
        if self._probe is not None:
            yield from self._finish_check(iteration, self._probe, fp8)

    def _is_logged(self, iteration: int) -> bool:
        return iteration % self._log_interval == 0

    def state_dict(self) -> dict[str, list[int]]:
        """The fallback's state, the same on every rank; empty when it is off."""
        return self._decider.state_dict() if self._decider is not None else {}

    def load_state_dict(self, saved: Mapping[str, list[int]]) -> None:
        """Take over a `state_dict`; without fallback there is nothing to take over."""
        if self._decider is not None and saved:
            self._decider.load_state_dict(saved)
            self._precision.fall_back(self._decider.fallen_back)

    def _operands(self) -> list[Operand]:
        """Those of this rank's layers that run in FP8."""
        return [operand for operand in operands(self._precision.layers) if self._precision.runs_in_fp8(operand.layer)]

    def _new_probe(self, fp8: Fp8Policy) -> TensorProbe:
        """Measures the layers in FP8, and, if they may return, those that have fallen back."""
        fallen = self._decider.fallen_back if self._decider is not None else frozenset()
        returns = bool(fallen) and fp8.health.num_healthy_checks > 0
        watched = {
            number: layer
            for number, layer in self._precision.layers.items()
            if self._precision.runs_in_fp8(number) or (returns and number in fallen)
        }
        device = self._precision.device
        shadow = (lambda kind: fresh_quantizer(fp8, kind, device)) if returns else None
        return TensorProbe(watched, shadow, bf16_layers=fallen)

    def _scale_events(self, iteration: int, scales: Mapping[str, OperandScale]) -> Iterator[Event]:
        values: dict[str, Value] = {"iteration": iteration}
        for name, scale in scales.items():
            values |= {f"fp8/{name}/{series}": value for series, value in scale.series().items()}
        if scales:
            yield "fp8", values

    def _finish_check(self, iteration: int, probe: TensorProbe, fp8: Fp8Policy) -> Iterator[Event]:
        measured = self._of_all_stages(probe.read(self._groups.tp_dp))
        amaxes = probe.read_shadow_amaxes(self._groups.tp_dp)
        fallen = sorted(self._decider.fallen_back) if self._decider is not None else []
        # Of fallen-back layers it says what FP8 would do.
        values: dict[str, Value] = {"iteration": iteration, "fallen-back-layers": fallen}
        layers: dict[int, dict[str, TensorHealth]] = {}
        for name, health in measured.items():
            layers.setdefault(layer_number(name), {})[name] = health
            values |= {
                f"fp8/{name}/clipped": health.clipped,
                f"fp8/{name}/flushed": health.flushed,
                f"fp8/{name}/error": health.error,
                f"fp8/{name}/sqnr-db": health.sqnr_db,
            }
        yield "fp8-check", values
        if self._decider is None:
            return
        changes = self._decider.check(layers)
        if not changes:
            return
        self._precision.fall_back(self._decider.fallen_back)
        if fp8.recipe == "delayed":
            seed_delayed_scales(self._operands(), amaxes, fp8)
        for change in changes:
            yield "fp8-fallback", {"iteration": iteration, **_description(change)}

    def _of_all_stages(self, values: Mapping[str, T]) -> dict[str, T]:
        """This stage's values and those of all others, by layer; collective over the pipeline's ranks."""
        stages = all_gather(dict(values), self._groups.pp)
        merged = {name: value for stage in stages for name, value in stage.items()}
        return {name: merged[name] for name in sorted(merged, key=lambda name: (layer_number(name), name))}


def _description(change: Change) -> dict[str, Value]:
    if change.reason is None:
        return {"layer": change.layer, "runs in": "fp8"}
    reason = change.reason
    return {
        "layer": change.layer,
        "runs in": "bf16",
        "tensor": reason.tensor,
        "quantity": reason.quantity,
        "value": reason.value,
        "limit": reason.limit,
    }
