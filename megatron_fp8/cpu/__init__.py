"""The stand-in: runs Transformer Engine and Megatron Core programs, written for GPUs, on CPUs.

    from megatron_fp8 import cpu

    cpu.install()  # before the first import of transformer_engine or megatron.core

    import torch
    import transformer_engine.pytorch as te

    linear = te.Linear(32, 32, device="cuda")

`torch.cuda`, NCCL's process groups and TE's compiled extension are then emulated on the host, FP8 by value; the Python
of both libraries is unmodified. On a machine with CUDA `install()` does nothing, so the same script runs on both.
`python -m megatron_fp8.cpu [-m MODULE | SCRIPT] ARGS` runs an unmodified program, and the processes that it starts.
`docs/api.md` has complete programs.
"""

from megatron_fp8.cpu.host_memory import peak_resident_bytes
from megatron_fp8.cpu.install import describe, install, installed, reject_missing_stand_in

__all__ = ["describe", "install", "installed", "peak_resident_bytes", "reject_missing_stand_in"]
