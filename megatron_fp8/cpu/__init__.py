"""The stand-in that runs Transformer Engine and Megatron Core on CPUs. `install()` is the way in."""

from megatron_fp8.cpu.install import describe, install, installed
from megatron_fp8.cpu.resident_memory import peak_resident_bytes

__all__ = ["describe", "install", "installed", "peak_resident_bytes"]
