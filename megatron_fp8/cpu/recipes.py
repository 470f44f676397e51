"""Which FP8 recipes Transformer Engine may use on the stand-in: those of a Hopper GPU, and MXFP8.

TE asks for compute capability 10.0 before it runs MXFP8. The stand-in has MXFP8's kernels, but answers 9.0 elsewhere:
10.0 would also change which GEMM layouts per-tensor FP8 uses, which attention backend is chosen, and the recipe that
TE takes where a program names none. Imports no Transformer Engine: the module to change is handed over.
"""

from __future__ import annotations

from types import ModuleType


def _allow_mxfp8(quantization: ModuleType) -> None:
    def supported() -> tuple[bool, str]:
        return True, ""

    def default_recipe() -> object:
        # What TE takes at capability 9.0.
        return quantization.DelayedScaling()

    quantization._compute_mxfp8_support = supported  # type: ignore[attr-defined]
    quantization.get_default_fp8_recipe = default_recipe  # type: ignore[attr-defined]


RECIPE_PATCHES = {"transformer_engine.pytorch.quantization": _allow_mxfp8}
