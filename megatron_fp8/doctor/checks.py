"""Owns the list of checks: their order, where each is, and what each is pointless without. Imports none of them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_fp8.doctor.finding import Finding, Surroundings

# Of one process alone; name to module and function.
ALONE = {
    "python": "packages.python",
    "packages": "packages.packages",
    "driver": "machine.driver",
    "shared memory": "machine.shared_memory",
    "run root": "machine.disk",
    "home": "machine.home",
    "limits": "machine.limits",
    "wandb": "packages.wandb",
    "data helper": "libraries.data_helper",
    "torch": "libraries.torch_and_device",
    "transformer engine": "libraries.transformer_engine",
    "cuda libraries": "loaded.cuda_libraries",
    "fp8": "libraries.fp8",
    "fused kernels": "libraries.fused_kernels",
    "megatron core": "libraries.megatron_core",
    "apex": "libraries.apex",
}
# Of all ranks at once: every rank carries them out, and they meet.
TOGETHER = {
    "gloo": "together.gloo",
    "nccl": "together.device_collectives",
    "shared files": "together.shared_files",
}
# Made of what all ranks found.
SAME_VERSIONS = "same versions"
GATHER = "together.gather"
ORDER = (*ALONE, *TOGETHER, SAME_VERSIONS)
NEEDS = {
    "transformer engine": "torch",
    "cuda libraries": "transformer engine",
    "fp8": "transformer engine",
    "fused kernels": "transformer engine",
    "megatron core": "transformer engine",
    "apex": "torch",
    "gloo": "torch",
    "nccl": "gloo",
    "shared files": "gloo",
}


def carry_out(check: str, surroundings: Surroundings) -> Finding:
    """Import a check and call it; what it raises passes through."""
    finding = call({**ALONE, **TOGETHER}[check], surroundings)
    assert isinstance(finding, Finding)
    return finding


def call(place: str, surroundings: Surroundings) -> Any:
    """What the function at `place`, a module of the doctor and its function, answers."""
    module, _, function = place.partition(".")
    return getattr(import_module(f"megatron_fp8.doctor.{module}"), function)(surroundings)
