"""Tabulates GPUs: what NVIDIA publishes about each, and what it does not. Imports no torch.

Peaks are for dense matrices in TFLOP/s (NVIDIA's data sheets print the doubled numbers of 2:4 sparsity first), memory
in GB, bandwidths in GB/s; NVLink and network count one direction (NVIDIA's NVLink numbers count both).

Sources: NVIDIA A100 Tensor Core GPU datasheet (2021); NVIDIA H100 Tensor Core GPU datasheet (SXM5, NVL) and Hopper
architecture whitepaper (PCIe); NVIDIA H200 Tensor Core GPU datasheet; HGX B200 of NVIDIA's HGX datasheet, an eighth of
the system's numbers. The network is not part of a GPU: one port each, as in the DGX A100 (200 Gb/s), H100, H200 and
B200 (400 Gb/s) systems.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megatron_fp8.config.attention import HOPPER_ATTENTION, FusedAttention

_HOPPER_WORKSPACE_BYTES = 32 * 2**20 + 1024
_EARLIER_WORKSPACE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Board:
    """Memory in GB; bandwidths in GB/s of memory, and in one direction of NVLink and of a network port."""

    memory_gb: float
    memory_gb_per_s: float
    nvlink_gb_per_s: float
    network_gb_per_s: float


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; `board` is None for the stand-in, which has neither memory nor links.

    `peaks_tflops`: dense matrix products by format; missing ones are unknown, for the reason in `unknown_peaks`.
    `keeps_transposes`: FP8 GEMMs read operands in one layout only, so TE also keeps per-tensor scaled weights
    transposed (Hopper). `mask_bytes`: per element of a dropout mask; None: as wide as the activation.
    `gemm_workspace_bytes`: what TE allocates for cuBLAS. `attention`: what fused kernels support.
    """

    name: str
    title: str
    peaks_tflops: dict[str, float]
    unknown_peaks: dict[str, str]
    board: Board | None
    keeps_transposes: bool = False
    mask_bytes: int | None = 1
    gemm_workspace_bytes: int = _HOPPER_WORKSPACE_BYTES
    attention: FusedAttention = field(default_factory=FusedAttention)

    def peak_flops(self, format_name: str) -> float | None:
        """FLOP/s of dense products in a format; None: unknown."""
        peak = self.peaks_tflops.get(format_name)
        return None if peak is None else peak * 1e12

    def why_unknown(self, format_name: str) -> str:
        """Why `peak_flops` returns None."""
        return self.unknown_peaks.get(format_name, f"{self.title}: no peak for {format_name} is published")

    @property
    def memory_bytes(self) -> float | None:
        """Memory in bytes according to the data sheet; None: unknown."""
        return None if self.board is None else self.board.memory_gb * 1e9


_FP32 = {"fp32": "FP32 products run on tensor cores only if TF32 is allowed, which a config does not say"}
_NO_FP8 = {**_FP32, "fp8": "the A100 has no FP8 tensor cores"}


def _hopper(name: str, title: str, bf16: float, fp8: float, memory: tuple[float, float], nvlink: float) -> Gpu:
    peaks = {"bf16": bf16, "fp16": bf16, "fp8": fp8}
    board = Board(*memory, nvlink, 50.0)
    return Gpu(name, title, peaks, _FP32, board, keeps_transposes=True, attention=HOPPER_ATTENTION)


def _ampere(name: str, title: str, memory: tuple[float, float], nvlink: float) -> Gpu:
    peaks = {"bf16": 312.0, "fp16": 312.0}
    board = Board(*memory, nvlink, 25.0)
    return Gpu(
        name,
        title,
        peaks,
        _NO_FP8,
        board,
        gemm_workspace_bytes=_EARLIER_WORKSPACE_BYTES,
        attention=FusedAttention(deterministic=False),
    )


_EMULATED = "the CPU emulates the formats: a share of a peak would mean nothing"
_CPU = Gpu(
    name="cpu",
    title="CPU stand-in",
    peaks_tflops={},
    unknown_peaks=dict.fromkeys(("fp32", "fp16", "bf16", "fp8"), _EMULATED),
    board=None,
    mask_bytes=None,
    # Transformer Engine sees a Hopper GPU.
    attention=replace(HOPPER_ATTENTION, fp32=True),
)

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _ampere("a100-40g", "A100 SXM 40 GB", (40.0, 1555.0), 300.0),
        _ampere("a100-80g", "A100 SXM 80 GB", (80.0, 2039.0), 300.0),
        _hopper("h100-80g", "H100 SXM 80 GB", 989.4, 1978.9, (80.0, 3350.0), 450.0),
        _hopper("h100-pcie-80g", "H100 PCIe 80 GB", 756.0, 1513.0, (80.0, 2000.0), 300.0),
        _hopper("h100-nvl-94g", "H100 NVL 94 GB", 835.5, 1670.5, (94.0, 3900.0), 300.0),
        _hopper("h200-141g", "H200 SXM 141 GB", 989.4, 1978.9, (141.0, 4800.0), 450.0),
        Gpu(
            "b200-180g",
            "B200 (HGX) 180 GB",
            {"bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0},
            _FP32,
            Board(180.0, 8000.0, 900.0, 50.0),
        ),
        _CPU,
    )
}
DEFAULT_GPU = "h100-80g"
