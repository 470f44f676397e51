"""Installs the stand-in: one call, before Transformer Engine or Megatron Core is imported. No part may import either.

Overhead, on one thread of a shared Xeon with torch 2.13: 1.5 microseconds per patched factory call, 0.25 per
`Tensor.to`, 0.2 per `Tensor.device` or `is_cuda`, 1 per kernel call, none per operation on GPU tensors, 7 per operation
on host tensors and 2 per attribute of one.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

from megatron_fp8.cpu.host_memory import keep_freed_memory
from megatron_fp8.cpu.import_hook import patch_after_import
from megatron_fp8.cpu.library_patches import LIBRARY_PATCHES

_EXTENSION = "transformer_engine_torch"
_MARK = "__megatron_fp8_cpu__"
# These look for the extension, or for Transformer Engine, when imported.
_TOO_LATE_AFTER = (_EXTENSION, "transformer_engine", "megatron.core")


def installed() -> bool:
    """Whether this process runs on the stand-in."""
    return _MARK in vars(sys.modules.get(_EXTENSION, sys))


def install(force: bool = False) -> bool:
    """Emulate `torch.cuda` and `transformer_engine_torch` on the CPU; return whether they are emulated now.

    Does nothing on a machine with CUDA unless `force`, and nothing when called again. Raises RuntimeError when
    Transformer Engine or Megatron Core was imported before: they look for CUDA at import.
    """
    if installed():
        return True
    # Not imported at the top, so that `--help` needs no torch.
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
    from megatron_fp8.cpu.extension import build_extension

    # First, so that an error in it leaves torch unchanged.
    extension = build_extension()
    setattr(extension, _MARK, True)
    _set_environment()
    keep_freed_memory()
    _patch_torch()
    sys.modules[_EXTENSION] = extension
    patch_after_import(LIBRARY_PATCHES)
    return True


def reject_missing_stand_in(error: RuntimeError) -> None:
    """Raise RuntimeError with how to install the stand-in, if `error` comes from importing TE without CUDA or it."""
    import torch

    if installed() or torch.cuda.is_available():
        return
    raise RuntimeError(
        "Transformer Engine finds no CUDA on this machine, and the CPU stand-in is not installed. Start the program "
        "with\n\n    from megatron_fp8 import cpu\n\n    cpu.install()\n\n"
        "before anything imports transformer_engine or megatron.core, or run it unchanged with\n\n"
        "    python -m megatron_fp8.cpu SCRIPT ARGS"
    ) from error


def describe() -> str:
    """One line for the log: what this process computes on."""
    if not installed():
        return "CUDA: torch.cuda and transformer_engine_torch are the real ones"
    version = importlib.metadata.version("transformer_engine")
    emulated = f"torch.cuda and transformer_engine_torch emulated (TE {version})"
    return f"CPU stand-in: {emulated}, FP8 emulated by value"


def _set_environment() -> None:
    # Keeps Transformer Engine from loading its shared libraries.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    # torch.compile needs a C++ compiler and seconds per function; eager gives the same numbers. Megatron Core compiles
    # a method where it defines it: torch would import its compiler, which takes the stub for a complete Triton.
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def _patch_torch() -> None:
    from megatron_fp8.cpu.autocast import patch_autocast
    from megatron_fp8.cpu.classes import patch_classes
    from megatron_fp8.cpu.collectives import patch_collectives
    from megatron_fp8.cpu.cuda import patch_accelerator, patch_cuda
    from megatron_fp8.cpu.factories import patch_factories
    from megatron_fp8.cpu.generators import patch_generators
    from megatron_fp8.cpu.moves import patch_moves
    from megatron_fp8.cpu.operations import patch_operations
    from megatron_fp8.cpu.propagation import patch_gradients, patch_saving
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
