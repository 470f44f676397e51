"""Float8 by `ml_dtypes` and NumPy, which share no code with torch: what the stand-in's FP8 is judged by."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

FORMATS = {torch.float8_e4m3fn: (ml_dtypes.float8_e4m3fn, 448.0), torch.float8_e5m2: (ml_dtypes.float8_e5m2, 57344.0)}


def quantized_bytes(x: torch.Tensor, scale: float, fp8: torch.dtype) -> np.ndarray:
    """Bytes of `x * scale`, multiplied in FP32, clamped to the largest finite value and rounded to nearest even."""
    reference, limit = FORMATS[fp8]
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = x.float().cpu().numpy() * np.float32(scale)
    return np.clip(scaled, -limit, limit).astype(reference).view(np.uint8)


def values(data: np.ndarray, fp8: torch.dtype) -> np.ndarray:
    """Float64 numbers of float8 bytes."""
    return data.view(FORMATS[fp8][0]).astype(np.float64)


def rounded(x: torch.Tensor, scale: float, fp8: torch.dtype) -> torch.Tensor:
    """Float64 values of `x` after quantization with `scale`, dequantized with FP32's reciprocal of it."""
    scale_inv = np.float64(np.float32(1) / np.float32(scale))
    return torch.from_numpy(values(quantized_bytes(x, scale, fp8), fp8) * scale_inv).cuda()


def on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    """The options with their tensors where kernels read them: the table is made before factories make GPU tensors."""
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
