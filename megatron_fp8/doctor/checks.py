"""Owns the list of checks: their order, where each is, and what each is pointless without. Imports none of them."""

from __future__ import annotations

from importlib import import_module

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
    "fp8": "libraries.fp8",
    "fused kernels": "libraries.fused_kernels",
    "megatron core": "libraries.megatron_core",
    "apex": "libraries.apex",
}
# Of all ranks at once.
TOGETHER = {
    "gloo": "together.gloo",
    "nccl": "together.device_collectives",
    "shared files": "together.shared_files",
    "same versions": "together.same_versions",
}
NEEDS = {
    "transformer engine": "torch",
    "fp8": "transformer engine",
    "fused kernels": "transformer engine",
    "megatron core": "transformer engine",
    "apex": "torch",
    "gloo": "torch",
    "nccl": "gloo",
    "shared files": "gloo",
    "same versions": "gloo",
}


def carry_out(check: str, surroundings: Surroundings) -> Finding:
    """Import a check and call it; what it raises passes through."""
    module, _, function = {**ALONE, **TOGETHER}[check].partition(".")
    finding = getattr(import_module(f"megatron_fp8.doctor.{module}"), function)(surroundings)
    assert isinstance(finding, Finding)
    return finding
