"""Computes delayed scales once per step, and keeps their state as plain named tensors.

The formula is TE's (`quantization._default_sf_compute`): scale = FP8 maximum / amax / 2^margin, from the maximum or
the newest entry of the amax history. Degenerate amaxes of a step:

- 0 (nothing seen, or all zero): the scale stays.
- So small that the quotient overflows FP32: the scale becomes the largest FP32 value.
- NaN or infinite, on any rank and in any micro-batch: counts as nothing seen. TE keeps the scale of such a step too,
  but lets an infinite amax into the history, where `max` finds it and keeps the scale for as many steps as the
  history is long.

State is saved as named tensors and not as TE saves it, a pickle in each module's extra state: TE refuses to load that.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, _default_sf_compute

from megatron_fp8.precision.te_recipe import linear_modules

# TE keeps one state for the forward and one for the backward operands of a module.
_DIRECTIONS = ("scaling_fwd", "scaling_bwd")
# Separates a name from the rank that owns the state, where each rank has its own.
_OWNER = "@"


class DelayedScales:
    """Moves histories on after every step, and computes scales after every `interval`-th one.

    `num_updates`: finished steps, without skipped ones.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self.num_updates = 0

    def finish_step(self, running_amaxes: Sequence[Tensor], skipped: bool) -> None:
        """Move the histories on and compute scales; a skipped step's amaxes are dropped.

        `running_amaxes`: the first rows of the histories. Collective over the ranks that reduce amaxes.
        """
        if skipped:
            for amax in running_amaxes:
                amax.zero_()
            return
        if running_amaxes:
            joined = torch.cat(list(running_amaxes)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            finite = torch.split(joined, [amax.numel() for amax in running_amaxes])
            torch._foreach_copy_(list(running_amaxes), list(finite))
        self.num_updates += 1
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)

    def compute(self, amax: Tensor, scale: Tensor, fp8_max: float, recipe: DelayedScaling) -> Tensor:
        """TE's formula on every `interval`-th step, the old scale otherwise."""
        if self.num_updates % self._interval:
            return scale
        computed: Tensor = _default_sf_compute(amax, scale, fp8_max, recipe.margin)
        return computed


@dataclass(frozen=True)
class ScalingState:
    """Scaling state of one module in one direction; the tensors are TE's own, not copies.

    `name`: module name and direction. `scale`: FP32 `[num_operands]`. `amax_history`: FP32
    `[history_len, num_operands]`; row 0 collects the running step, the others are earlier steps, oldest first.
    """

    name: str
    scale: Tensor
    amax_history: Tensor


@dataclass(frozen=True)
class ScaleUnits:
    """Units of scales: a scale is `fp8_max / amax / 2^margin`, with the `fp8_max` of the direction's format."""

    fp8_max_fwd: float
    fp8_max_bwd: float
    margin: int

    def of(self, state: ScalingState) -> float:
        """The amax of scale 1 in the format of the state's direction."""
        is_forward = state.name.endswith(_DIRECTIONS[0])
        return (self.fp8_max_fwd if is_forward else self.fp8_max_bwd) / 2.0**self.margin


def scaling_states(module: nn.Module, name: str = "") -> Iterator[ScalingState]:
    """Delayed-scaling state of every linear layer in `module`, in order; `name`: the module's own.

    TE's attention has such state too, which only FP8 attention uses.
    """
    for path, child in linear_modules(module).items():
        for direction in _DIRECTIONS:
            state = child.fp8_meta.get(direction)
            if state is not None and getattr(state, "amax_history", None) is not None:
                whole_name = ".".join(part for part in (name, path, direction) if part)
                yield ScalingState(whole_name, state.scale, state.amax_history)


def capture(
    states: Iterable[ScalingState], units: ScaleUnits, owner: str | None, device: torch.device
) -> dict[str, Tensor]:
    """Copies of the states by name, on `device`; the union of all ranks' results describes the whole job.

    `owner`: this rank's name if its state differs from other ranks' (no amax reduction), else None.
    """
    suffix = "" if owner is None else f"{_OWNER}{owner}"
    saved = {
        "units.fp8_max_fwd": torch.tensor(units.fp8_max_fwd, device=device),
        "units.fp8_max_bwd": torch.tensor(units.fp8_max_bwd, device=device),
        "units.margin": torch.tensor(units.margin, device=device),
    }
    for state in states:
        saved[f"{state.name}.scale{suffix}"] = state.scale.clone()
        saved[f"{state.name}.amax_history{suffix}"] = state.amax_history.clone()
    return saved


def restore(
    states: Iterable[ScalingState], saved: Mapping[str, Tensor], units: ScaleUnits, owner: str | None
) -> list[str]:
    """Load what `capture` saved under any layout into this rank's states; returns notes on what was changed or lost.

    State of reduced amaxes does not depend on the layout. Where each rank had its own, a rank of the same name gets its
    own back; any other rank gets the largest amaxes and the smallest scale of all. Another format or margin changes the
    scale's unit, not the history; a longer history loses its oldest rows.
    """
    before = ScaleUnits(
        float(saved["units.fp8_max_fwd"]), float(saved["units.fp8_max_bwd"]), int(saved["units.margin"])
    )
    notes = [] if before == units else [f"scales converted from {before} to {units}"]
    for state in states:
        history_name, scale_name = f"{state.name}.amax_history", f"{state.name}.scale"
        found = _find(saved, history_name, owner)
        if not found:
            notes.append(f"{state.name}: no saved state (its layer did not run in FP8); starting from scratch")
            continue
        if len(found) > 1:
            notes.append(f"{state.name}: merged from {len(found)} ranks (largest amaxes, smallest scale)")
        history = torch.stack([saved[history_name + suffix] for suffix in found]).amax(dim=0)
        scale = torch.stack([saved[scale_name + suffix] for suffix in found]).amin(dim=0)
        if history.shape[1] != state.amax_history.shape[1]:
            raise ValueError(
                f"{state.name} has {state.amax_history.shape[1]} operands but {history.shape[1]} were saved: "
                "the state belongs to another model"
            )
        dropped = _copy_history(history, state.amax_history)
        if dropped:
            notes.append(f"{state.name}: the history is shorter and loses its {dropped} oldest amaxes")
        # The scale of a tiny amax is the largest FP32 value, also in a larger unit.
        unit = units.of(state) / before.of(state)
        state.scale.copy_((scale * unit).clamp(max=torch.finfo(torch.float32).max))
    return notes


def _find(saved: Mapping[str, Tensor], name: str, owner: str | None) -> list[str]:
    """Suffixes under which `name` was saved: the owner's, else the common one, else all ranks'."""
    for suffix in ("" if owner is None else f"{_OWNER}{owner}", ""):
        if name + suffix in saved:
            return [suffix]
    return sorted(key[len(name) :] for key in saved if key.startswith(name + _OWNER))


def _copy_history(source: Tensor, target: Tensor) -> int:
    """Copy the running row and the newest others; returns how many non-empty rows did not fit."""
    num_rows = min(len(source), len(target)) - 1
    target.zero_()
    target[0].copy_(source[0])
    if num_rows > 0:
        target[-num_rows:].copy_(source[-num_rows:])
    left_out = source[1 : len(source) - num_rows]
    return int((left_out > 0).any(dim=1).sum())
