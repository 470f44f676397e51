"""Owns the modes that are compared: their names, and the config keys that each stands for. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_fp8.precision.policy import Fp8Recipe


@dataclass(frozen=True)
class Mode:
    """One way to compute. `torchao_recipe`: torchao's FP8 in the plain-PyTorch model; None: this project's own step."""

    name: str
    precision: str
    fp8_recipe: Fp8Recipe | None = None
    torchao_recipe: Literal["tensorwise", "rowwise"] | None = None

    @property
    def overrides(self) -> tuple[str, ...]:
        """As on a command line."""
        recipe = () if self.fp8_recipe is None else (f"precision.fp8_recipe={self.fp8_recipe}",)
        return (f"precision.mode={self.precision}", *recipe)


# Outside the blocks torchao's runs are BF16, so that is the mode of their config.
MODES = {
    mode.name: mode
    for mode in (
        Mode("fp32", "fp32"),
        Mode("bf16", "bf16"),
        Mode("fp16", "fp16"),
        Mode("fp8-delayed", "fp8", "delayed"),
        Mode("fp8-tensorwise", "fp8", "tensorwise"),
        Mode("fp8-blockwise", "fp8", "blockwise"),
        Mode("fp8-mxfp8", "fp8", "mxfp8"),
        Mode("torchao-tensorwise", "bf16", torchao_recipe="tensorwise"),
        Mode("torchao-rowwise", "bf16", torchao_recipe="rowwise"),
    )
}


def default_reference(modes: Sequence[str]) -> str:
    """What the others are compared with: fp32 if it is among `modes`, else bf16, else the first."""
    return next((name for name in ("fp32", "bf16") if name in modes), modes[0])
