"""Rotary position embedding of `transformer_engine_torch`. Must not know attention or modules.

Arithmetic is FP32 and the result is rounded once, as in TE's kernels. `thd` input and context parallelism have no
stand-in yet.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.enums import NVTE_QKV_Format

__all__ = ["fused_rope_backward", "fused_rope_forward"]


def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,  # noqa: ARG001
) -> Tensor:
    """Rotate the first `r` features of each head by the angles of their position; the others pass.

    input: `[s, b, h, d]` or `[b, s, h, d]` by `qkv_format`, any strides. freqs: FP32 angles `[>= s, 1, 1, r]`.
    start_positions: int32 `[b]`, position of each sample's first token, or None for 0. The two features of a pair lie
    r / 2 apart, or side by side with `interleaved`: `(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)`.
    """
    _check_supported(qkv_format, cu_seqlens, cp_size)
    return _rotate(input, freqs, start_positions, qkv_format, interleaved, backward=False)


def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,  # noqa: ARG001
) -> Tensor:
    """Gradient of `fused_rope_forward`: the rotation back; arguments and shapes as there."""
    _check_supported(qkv_format, cu_seqlens, cp_size)
    return _rotate(output_grads, freqs, start_positions, qkv_format, interleaved, backward=True)


def _check_supported(qkv_format: Any, cu_seqlens: Tensor | None, cp_size: int) -> None:
    supported = (NVTE_QKV_Format.NVTE_SBHD, NVTE_QKV_Format.NVTE_BSHD)
    if int(qkv_format) not in supported or cu_seqlens is not None:
        raise NotImplementedError("fused_rope for packed (thd) sequences has no CPU stand-in")
    if cp_size > 1:
        raise NotImplementedError("fused_rope with context parallelism has no CPU stand-in")


def _rotate(
    x: Tensor, freqs: Tensor, start_positions: Tensor | None, qkv_format: Any, interleaved: bool, backward: bool
) -> Tensor:
    rotated = freqs.shape[-1]
    angles = _angles(x, freqs, start_positions, qkv_format)
    out = torch.empty(x.shape, dtype=torch.float32)
    values = x.float()
    out[..., rotated:] = values[..., rotated:]
    x1, x2 = _pair(values[..., :rotated], interleaved)
    out1, out2 = _pair(out[..., :rotated], interleaved)
    cos1, cos2 = _pair(angles.cos(), interleaved)
    sin1, sin2 = _pair(angles.sin(), interleaved)
    torch.mul(x1, cos1, out=out1)
    torch.mul(x2, cos2, out=out2)
    if backward:
        out1.addcmul_(x2, sin2)
        out2.addcmul_(x1, sin1, value=-1)
    else:
        out1.addcmul_(x2, sin1, value=-1)
        out2.addcmul_(x1, sin2)
    return out.to(x.dtype)


def _angles(x: Tensor, freqs: Tensor, start_positions: Tensor | None, qkv_format: Any) -> Tensor:
    """FP32 angles that broadcast over x: `[s, b or 1, 1, r]`, transposed for `bshd`."""
    sequence_first = int(qkv_format) == NVTE_QKV_Format.NVTE_SBHD
    length = x.shape[0 if sequence_first else 1]
    table = freqs.float().reshape(freqs.shape[0], -1)
    if start_positions is None:
        angles = table[:length].unsqueeze(1)
    else:
        positions = torch.arange(length).unsqueeze(1) + start_positions.long().unsqueeze(0)
        angles = table[positions]
    angles = angles.unsqueeze(2)
    return angles if sequence_first else angles.transpose(0, 1)


def _pair(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """First and second features of the pairs, as views."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
