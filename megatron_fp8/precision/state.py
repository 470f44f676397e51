"""Owns delayed-scaling state as plain named tensors: finding it in TE's modules, saving it, putting it back.

TE's own way, a pickle in each module's extra state, is not used: TE itself refuses to load it. Must not know recipes
or groups.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_fp8.precision.te_modules import linear_modules

# TE keeps one state for the operands of the forward and one for those of the backward GEMMs of a module.
_DIRECTIONS = ("scaling_fwd", "scaling_bwd")
# Between a tensor's name and the rank that it belongs to, where every rank has its own.
_OWNER = "@"


@dataclass(frozen=True)
class ScalingState:
    """The scaling state of one module in one direction.

    `name`: module name and direction. `scale`: FP32 `[num_operands]`. `amax_history`: FP32
    `[history_len, num_operands]`; row 0 collects the running step, the rows after it are earlier steps, the last row
    the newest of them. Both are TE's own tensors, not copies.
    """

    name: str
    scale: Tensor
    amax_history: Tensor

    @property
    def is_forward(self) -> bool:
        """Whether the operands are those of fprop (input, weight), not output gradients."""
        return self.name.endswith(_DIRECTIONS[0])


@dataclass(frozen=True)
class ScaleUnits:
    """What scales refer to: a scale is `fp8_max / amax / 2^margin`, `fp8_max` that of the direction's format."""

    fp8_max_fwd: float
    fp8_max_bwd: float
    margin: int

    def largest_amax(self, scale: float, forward: bool) -> float:
        """The largest amax that does not clip under `scale`, head-room of the margin included."""
        return (self.fp8_max_fwd if forward else self.fp8_max_bwd) / 2.0**self.margin / scale


def scaling_states(module: nn.Module, prefix: str = "") -> Iterator[ScalingState]:
    """Every linear layer's delayed-scaling state below `module`, in order; `prefix` goes before the names.

    TE's attention has such state too, which nothing uses outside of FP8 attention.
    """
    for name, child in linear_modules(module).items():
        for direction in _DIRECTIONS:
            state = child.fp8_meta.get(direction)
            if state is not None and getattr(state, "amax_history", None) is not None:
                yield ScalingState(f"{prefix}{name}.{direction}", state.scale, state.amax_history)


def capture(
    states: Iterable[ScalingState], units: ScaleUnits, owner: str | None, device: torch.device
) -> dict[str, Tensor]:
    """Copies of the states by name, for `torch.save` or any other format of named tensors, all on `device`.

    `owner`: this rank's name where its state differs from other ranks' (no amax reduction), else None. The union of
    all ranks' results describes the whole job.
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
    """Put what `capture` made on any layout into this rank's states; returns what could not be carried over as it was.

    State of reduced amaxes does not depend on the layout. Where ranks had their own, a rank of the same name gets
    its own back; another layout, or one that reduces, gets the largest amaxes and the smallest scale of all. Other
    formats or margins change the scale's unit, not the history; of a history that is too long the oldest rows go.
    """
    before = ScaleUnits(
        float(saved["units.fp8_max_fwd"]), float(saved["units.fp8_max_bwd"]), int(saved["units.margin"])
    )
    notes = [] if before == units else [f"scales were made for {before} and are converted to {units}"]
    for state in states:
        history_name, scale_name = f"{state.name}.amax_history", f"{state.name}.scale"
        found = _find(saved, history_name, owner)
        if not found:
            notes.append(f"{state.name}: nothing was saved for it (its layer did not run in FP8): it starts anew")
            continue
        if len(found) > 1:
            notes.append(f"{state.name}: {len(found)} ranks had their own: their largest amaxes, smallest scale")
        history = torch.stack([saved[history_name + suffix] for suffix in found]).amax(dim=0)
        scale = torch.stack([saved[scale_name + suffix] for suffix in found]).amin(dim=0)
        if history.shape[1] != state.amax_history.shape[1]:
            raise ValueError(
                f"{state.name} has {state.amax_history.shape[1]} operands, {history.shape[1]} were saved: "
                "this is the state of another model"
            )
        dropped = _copy_history(history, state.amax_history)
        if dropped:
            notes.append(f"{state.name}: the {dropped} oldest amaxes do not fit into the history")
        unit = units.largest_amax(1.0, state.is_forward) / before.largest_amax(1.0, state.is_forward)
        # The scale of a tiny amax is FP32's largest number, and stays it in a larger unit.
        state.scale.copy_((scale * unit).clamp(max=torch.finfo(torch.float32).max))
    return notes


def _find(saved: Mapping[str, Tensor], name: str, owner: str | None) -> list[str]:
    """Suffixes under which `name` was saved: the owner's own, or the common one, or all ranks'."""
    for suffix in ("" if owner is None else f"{_OWNER}{owner}", ""):
        if name + suffix in saved:
            return [suffix]
    return sorted(key[len(name) :] for key in saved if key.startswith(name + _OWNER))


def _copy_history(source: Tensor, target: Tensor) -> int:
    """Copy the newest rows and the running one; returns how many rows with something in them were left out."""
    num_rows = min(len(source), len(target)) - 1
    target.zero_()
    target[0].copy_(source[0])
    if num_rows > 0:
        target[-num_rows:].copy_(source[-num_rows:])
    left_out = source[1 : len(source) - num_rows]
    return int((left_out > 0).any(dim=1).sum())
