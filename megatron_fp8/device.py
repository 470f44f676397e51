"""The device of this process: CUDA or the stand-in, its clock, memory and sensors, its collective library.

The only module outside `megatron_fp8/cpu/` that names CUDA.
"""

import os
from dataclasses import dataclass

import torch

from megatron_fp8 import cpu
from megatron_fp8.config.problem import ConfigError, Problem


@dataclass(frozen=True)
class GpuReading:
    """A GPU's sensors; `megahertz`: the clock of its multiprocessors."""

    busy_percent: float
    celsius: float
    watts: float
    megahertz: float


class SensorError(Exception):
    """The GPUs' sensors cannot be read."""


@dataclass(frozen=True)
class Device:
    """What this process computes on.

    `emulated`: Transformer Engine's kernels and `torch.cuda` are the CPU stand-in.
    `collective_backend`: the device's collective library, `nccl`, which the stand-in emulates over gloo.
    """

    torch_device: torch.device
    emulated: bool
    collective_backend: str
    description: str

    def backend(self, requested: str) -> str:
        """The collective library for the config's `distributed_backend`; raises ConfigError if it is unavailable."""
        if requested == "nccl" and self.emulated:
            problem = Problem(
                "parallel.distributed_backend",
                requested,
                "NCCL needs CUDA, which this machine does not have",
                "parallel.distributed_backend=auto, which emulates NCCL over gloo here",
            )
            raise ConfigError.from_problems([problem])
        return self.collective_backend if requested == "auto" else requested

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        torch.cuda.synchronize()

    def is_idle(self) -> bool:
        """Whether the default stream, on which training runs, has no work left. Does not block; thread-safe."""
        return bool(torch.cuda.default_stream(self.torch_device).query())

    def is_first_of_node(self) -> bool:
        """Whether this process is its node's local rank 0."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def gpu_readings(self) -> list[GpuReading]:
        """One reading per visible GPU; none on CPUs. Raises SensorError."""
        if self.emulated:
            return []
        from pynvml import NVMLError

        try:
            return [
                GpuReading(
                    torch.cuda.utilization(gpu),
                    torch.cuda.temperature(gpu),
                    torch.cuda.power_draw(gpu) / 1e3,
                    torch.cuda.clock_rate(gpu),
                )
                for gpu in range(torch.cuda.device_count())
            ]
        except (NVMLError, RuntimeError) as error:
            raise SensorError(f"{type(error).__name__}: {error}") from error

    def timing_event(self) -> torch.cuda.Event:
        """An unrecorded event with timing; on CPUs it reads the host's clock."""
        return torch.cuda.Event(enable_timing=True)

    def range_push(self, name: str) -> None:
        """Begin an NVTX range."""
        torch.cuda.nvtx.range_push(name)

    def range_pop(self) -> None:
        """End the innermost NVTX range."""
        torch.cuda.nvtx.range_pop()

    def compute_capability(self) -> tuple[int, int]:
        """CUDA compute capability, (9, 0) for an H100; the emulated one on CPUs."""
        major, minor = torch.cuda.get_device_capability()
        return major, minor

    def peak_memory_bytes(self) -> int:
        """Peak memory since the process started, in bytes; on CPUs the process's peak resident memory."""
        return cpu.peak_resident_bytes() if self.emulated else int(torch.cuda.max_memory_allocated())


def library_versions() -> dict[str, str]:
    """Versions of CUDA, NCCL and cuDNN that torch was built with; empty for a torch without CUDA.

    Call before `prepare`, whose stand-in reports a version of CUDA too.
    """
    if torch.version.cuda is None:
        return {}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"CUDA of torch": torch.version.cuda, "NCCL": nccl, "cuDNN": str(torch.backends.cudnn.version())}


def prepare() -> Device:
    """Choose this process's device; without CUDA, install the stand-in.

    Call before Transformer Engine or Megatron Core is imported: they look for CUDA on import.
    """
    emulated = cpu.install()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local_rank)
    description = cpu.describe() if emulated else f"{torch.cuda.get_device_name(local_rank)}; {cpu.describe()}"
    return Device(torch.device("cuda", local_rank), emulated, "nccl", description)
