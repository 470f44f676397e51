"""How well a run uses its GPUs: model FLOP/s, their share of the peak, the pipeline's bubble.

A share of a peak that is not known is withheld, with the reason. Must not know how time is measured. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.flops import flops_per_token
from megatron_fp8.planner.gpus import GPUS, Gpu
from megatron_fp8.planner.pipeline import bubble_share

# By words of the name that the driver gives, the first that fits; boards whose peaks are not in the table fit none.
_NAMES = (
    (("H100", "PCIe"), "h100-pcie-80g"),
    (("H100", "NVL"), "h100-nvl-94g"),
    (("H100", "80GB", "HBM3"), "h100-80g"),
    (("A100", "SXM", "40GB"), "a100-40g"),
    (("A100", "SXM", "80GB"), "a100-80g"),
    (("B200",), "b200-180g"),
)


@dataclass(frozen=True)
class Throughput:
    """What turns tokens per second into use of the GPUs. `peak`: FLOP/s of one, None for the reason in `note`."""

    flops_per_token: float
    world_size: int
    peak: float | None
    note: str
    bubble: float

    def series(self, tokens_per_second: float) -> dict[str, float | None]:
        """Per GPU: tokens/s, `throughput` in model TFLOP/s (Megatron's name), MFU; and the pipeline's bubble."""
        tokens = tokens_per_second / self.world_size
        flops = tokens * self.flops_per_token
        return {
            "tokens-per-second-per-gpu": tokens,
            "throughput": flops / 1e12,
            "mfu": None if self.peak is None else flops / self.peak,
            "pipeline-bubble": self.bubble,
        }


def throughput_of(config: Config, layout: Layout, device_name: str, emulated: bool) -> Throughput:
    """Of a run on `layout.world_size` devices called `device_name`; the peak is that of the blocks' GEMMs' format.

    The bubble is that of a schedule whose stages all take equally long, not a measurement.
    """
    gpu = GPUS["cpu"] if emulated else gpu_called(device_name)
    peak = None if gpu is None else gpu.peak_flops(config.precision.mode)
    if gpu is None:
        note = f"withheld: no peak is known for {device_name}"
    elif peak is None:
        note = f"withheld: {gpu.why_unknown(config.precision.mode)}"
    else:
        note = f"share of {peak / 1e12:,.0f} TFLOP/s, the dense {config.precision.mode} peak of {gpu.title}"
    return Throughput(flops_per_token(config, layout).model, layout.world_size, peak, note, bubble_share(layout))


def gpu_called(name: str) -> Gpu | None:
    """The GPU that the driver calls `name` (as `NVIDIA H100 80GB HBM3`), None where the table has no such one."""
    if "H200" in name and "NVL" not in name:
        return GPUS["h200-141g"]
    return next((GPUS[key] for words, key in _NAMES if all(word in name for word in words)), None)
