"""TE's data types as torch's, and the largest values of the float8 formats. Must not know tensors."""

from typing import Any

import torch

from megatron_fp8.cpu.enums import DType

_TORCH_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FP32_MAX = torch.finfo(torch.float32).max


def torch_dtype(te_dtype: Any) -> torch.dtype:
    """The torch dtype of one of TE's: a `DType` of the extension or of TE's Python, or its integer.

    Raises KeyError for FP4, which torch cannot compute with.
    """
    return _TORCH_DTYPES[DType(int(te_dtype))]
