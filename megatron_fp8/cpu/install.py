"""Puts the stand-in in place: one call, before Transformer Engine or Megatron Core is imported.

Knows the order in which the parts go in, and where Transformer Engine looks for its compiled extension. What the
parts do is in their files, and no part may import Transformer Engine or Megatron Core.

Cost, measured on one thread of a shared Xeon with torch 2.13: a patched factory takes 1.5 microseconds longer,
`Tensor.to` 0.25, `Tensor.device` and `is_cuda` 0.2, a call of a kernel 1; operations on GPU tensors are untouched. An
operation on host tensors takes 7 longer, an attribute of one 2.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from types import ModuleType

from megatron_fp8.cpu.import_hook import patch_after_import
from megatron_fp8.cpu.malloc import keep_freed_memory
from megatron_fp8.cpu.megatron import MEGATRON_PATCHES
from megatron_fp8.cpu.recipes import RECIPE_PATCHES

_EXTENSION = "transformer_engine_torch"
_MARK = "__megatron_fp8_cpu__"
# They look for the extension, or for Transformer Engine, while they are imported.
_TOO_LATE_AFTER = (_EXTENSION, "transformer_engine", "megatron.core")


def installed() -> bool:
    """Whether this process runs on the stand-in."""
    return _MARK in vars(sys.modules.get(_EXTENSION, sys))


def install(force: bool = False) -> bool:
    """Make `torch.cuda` and `transformer_engine_torch` work on the CPU; return whether they now do so.

    Does nothing on a machine with CUDA unless `force`, and nothing when called again.

    Raises RuntimeError when Transformer Engine or Megatron Core was imported before: they decide at import
    what they can use.
    """
    if installed():
        return True
    # Torch is imported here and not above, so that help texts need no torch.
    import torch

    if torch.cuda.is_available() and not force:
        return False
    early = [name for name in _TOO_LATE_AFTER if name in sys.modules]
    if early:
        raise RuntimeError(
            f"megatron_fp8.cpu.install() was called after {early[0]} was imported, which has already looked "
            "for CUDA and for Transformer Engine's compiled extension. Call it before the first import of "
            "transformer_engine or megatron.core"
        )
    # First, so that an error in it leaves torch as it was.
    extension = _extension()
    _set_environment()
    keep_freed_memory()
    _patch_torch()
    sys.modules[_EXTENSION] = extension
    patch_after_import(
        {
            "transformer_engine.common": _find_stand_in,
            "transformer_engine.pytorch.attention.custom_ops": _patch_custom_ops,
            "transformer_engine.pytorch.attention.dot_product_attention.backends": _patch_attention,
            **MEGATRON_PATCHES,
            **RECIPE_PATCHES,
        }
    )
    return True


def reject_missing_stand_in(error: RuntimeError) -> None:
    """Raise RuntimeError that says how to install the stand-in, if `error` met an import of TE that lacks it."""
    import torch

    if installed() or torch.cuda.is_available():
        return
    raise RuntimeError(
        "Transformer Engine finds no CUDA on this machine, and the CPU stand-in is not installed. Begin the program "
        "with\n\n    from megatron_fp8 import cpu\n\n    cpu.install()\n\n"
        "before anything imports transformer_engine or megatron.core; or run it as it is with\n\n"
        "    python -m megatron_fp8.cpu SCRIPT ARGS"
    ) from error


def describe() -> str:
    """One line for the start of a log: where this process computes."""
    if not installed():
        return "CUDA: torch.cuda and transformer_engine_torch are the real ones"
    version = importlib.metadata.version("transformer_engine")
    emulated = f"torch.cuda and transformer_engine_torch emulated (TE {version})"
    return f"CPU stand-in: {emulated}, FP8 emulated by value"


def _set_environment() -> None:
    # Transformer Engine then does not look for its shared libraries.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    # torch.compile needs a C++ compiler and seconds for each function; eager gives the same numbers. Megatron Core
    # compiles a method where it defines it: torch would import its compiler, which takes the stub for a whole Triton.
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def _patch_torch() -> None:
    from megatron_fp8.cpu.accelerator import patch_accelerator
    from megatron_fp8.cpu.autocast import patch_autocast
    from megatron_fp8.cpu.classes import patch_classes
    from megatron_fp8.cpu.collectives import patch_collectives
    from megatron_fp8.cpu.cuda import patch_cuda
    from megatron_fp8.cpu.factories import patch_factories
    from megatron_fp8.cpu.generators import patch_generators
    from megatron_fp8.cpu.gradients import patch_gradients
    from megatron_fp8.cpu.moves import patch_moves
    from megatron_fp8.cpu.operations import patch_operations
    from megatron_fp8.cpu.saving import patch_saving
    from megatron_fp8.cpu.triton_stub import install_triton

    patch_cuda()
    patch_accelerator()
    patch_autocast()
    patch_generators()
    patch_factories()
    patch_moves()
    patch_gradients()
    patch_classes()
    patch_saving()
    patch_operations()
    patch_collectives()
    install_triton()


def _extension() -> ModuleType:
    from megatron_fp8.cpu.extension import build_extension

    extension = build_extension()
    setattr(extension, _MARK, True)
    return extension


def _patch_custom_ops(custom_ops: ModuleType) -> None:
    from megatron_fp8.cpu.custom_ops import allow_custom_ops_on_cpus

    allow_custom_ops_on_cpus(custom_ops)


def _patch_attention(backends: ModuleType) -> None:
    from megatron_fp8.cpu.attention_backend import patch_unfused_attention

    patch_unfused_attention(backends)


def _find_stand_in(common: ModuleType) -> None:
    original = common.load_framework_extension

    def load_framework_extension(framework: str) -> None:
        if framework != "torch":
            original(framework)

    common.load_framework_extension = load_framework_extension  # type: ignore[attr-defined]
