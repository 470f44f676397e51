"""Rotary position embedding of `transformer_engine_torch`, of one tensor or of q, k and v at once.

Arithmetic is FP32 and the result is rounded once, as in TE's kernels. With the halves of every head swapped in a copy,
`x * cos + swapped * (-sin, sin)` has inner loops over whole heads. On `[512, 4, 8, 64]`, one thread, interleaved: 0.6
of the time of the usual PyTorch expression in FP32, and 0.9 in BF16, which that rounds at every step; views of half
heads take 1.4 times as long.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.enums import NVTE_QKV_Format

__all__ = ["fused_qkv_rope_backward", "fused_qkv_rope_forward", "fused_rope_backward", "fused_rope_forward"]


@dataclass(frozen=True)
class _Rotation:
    """FP32 factors that broadcast over a tensor's rotated features: `x * cos + swapped(x) * sin`.

    The last axis is r; `sin` carries the sign of `(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)`.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @classmethod
    def of(cls, angles: Tensor, interleaved: bool, backward: bool) -> "_Rotation":
        sin = angles.sin()
        first, _ = _pair(sin, interleaved)
        first.neg_()
        # Backward is the transposed rotation.
        return cls(angles.cos(), _swapped(sin, interleaved) if backward else sin, interleaved)

    def turned(self, x: Tensor) -> Tensor:
        """FP32 rotation of x `[..., r]`, fresh and contiguous."""
        return _swapped(x, self.interleaved).float().mul_(self.sin).addcmul_(x.float(), self.cos)


def _pair(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """First and second features of the pairs, as views."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _swapped(x: Tensor, interleaved: bool) -> Tensor:
    """A copy with the two features of every pair exchanged."""
    if interleaved:
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    first, second = _pair(x, interleaved)
    return torch.cat((second, first), dim=-1)


def _on_rank(local: Tensor, length: int, cp_size: int, cp_rank: int) -> Tensor:
    """Positions in the whole sequence of the positions `local` among the `length` tokens of a context-parallel rank.

    A sequence is cut into 2 * cp_size chunks, of which rank r has chunk r from the start and chunk r from the end,
    which balances causal attention.
    """
    if cp_size == 1:
        return local
    chunk = length // 2
    second_offset = length * cp_size - (cp_rank + 1) * chunk - chunk
    return local + torch.where(local < chunk, cp_rank * chunk, second_offset)


def _angles(
    x: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """FP32 angles `[s, b or 1, 1, r]` that broadcast over x; `[b or 1, s, 1, r]` for bshd, `[t, 1, r]` for thd."""
    table = freqs.float().reshape(freqs.shape[0], -1)
    kind = NVTE_QKV_Format(int(qkv_format))
    if kind == NVTE_QKV_Format.NVTE_THD:
        assert cu_seqlens is not None
        return table[_packed_positions(x.shape[0], cu_seqlens, start_positions, cp_size, cp_rank)].unsqueeze(1)
    if kind not in (NVTE_QKV_Format.NVTE_SBHD, NVTE_QKV_Format.NVTE_BSHD):
        raise NotImplementedError(f"fused_rope for {kind.name} has no CPU stand-in")
    sequence_first = kind == NVTE_QKV_Format.NVTE_SBHD
    length = x.shape[0 if sequence_first else 1]
    positions = _on_rank(torch.arange(length), length, cp_size, cp_rank).unsqueeze(1)
    if start_positions is not None:
        # There may be more of them than sequences: a cache has room for future ones.
        starts = start_positions[: x.shape[1 if sequence_first else 0]]
        # Padding may be past the last position, and is not read.
        positions = (positions + starts.long().unsqueeze(0)).clamp(max=len(table) - 1)
    angles = table[positions].unsqueeze(2)
    return angles if sequence_first else angles.transpose(0, 1)


def _packed_positions(
    num_tokens: int, cu_seqlens: Tensor, start_positions: Tensor | None, cp_size: int, cp_rank: int
) -> Tensor:
    """Position of every token of a packed tensor, int64 `[t]`; 0 past the last sequence."""
    positions = torch.zeros(num_tokens, dtype=torch.int64)
    ends = [end // cp_size for end in cu_seqlens.tolist()]
    for index, (start, stop) in enumerate(itertools.pairwise(ends)):
        local = _on_rank(torch.arange(stop - start), stop - start, cp_size, cp_rank)
        positions[start:stop] = local if start_positions is None else local + int(start_positions[index])
    return positions


def _rotated(x: Tensor, rotation: _Rotation) -> Tensor:
    """Contiguous, in x's dtype: the first r features of `[..., d]` rotated, the others copied."""
    rotated = rotation.cos.shape[-1]
    turned = rotation.turned(x[..., :rotated]).to(x.dtype)
    return turned.contiguous() if rotated == x.shape[-1] else torch.cat((turned, x[..., rotated:]), dim=-1)


def _require(condition: bool, message: str, found: Any) -> None:
    if not condition:
        raise RuntimeError(f"{message}: {found}")


def _check_freqs(freqs: Tensor) -> None:
    """Raise RuntimeError as TE's `apply_rope.cpp` does."""
    shape = list(freqs.shape)
    _require(freqs.dim() == 4, "expected 4D tensor of freqs", shape)
    _require(shape[1:3] == [1, 1], "expected the second and third dims of the freqs tensor equal 1", shape)
    _require(freqs.dtype == torch.float32, "Dtype of the freqs tensor must be float", freqs.dtype)


def _check(
    x: Tensor, freqs: Tensor, start_positions: Tensor | None, qkv_format: Any, cu_seqlens: Tensor | None, cp_size: int
) -> None:
    """Raise RuntimeError for what TE's `fused_rope_forward` and `fused_rope_backward` refuse."""
    _check_freqs(freqs)
    if start_positions is not None:
        _require(start_positions.dim() == 1, "expected 1D tensor of start_positions", list(start_positions.shape))
    kind = NVTE_QKV_Format(int(qkv_format))
    if kind == NVTE_QKV_Format.NVTE_THD:
        _require(x.dim() == 3, "expected 3D tensor for thd", list(x.shape))
        if cu_seqlens is None:
            raise RuntimeError("expected cu_seqlens tensor for thd")
        _require(cu_seqlens.dim() == 1, "expected 1D tensor of cu_seqlens", list(cu_seqlens.shape))
    else:
        _require(x.dim() == 4, "expected 4D tensor", list(x.shape))
        length = x.shape[0 if kind == NVTE_QKV_Format.NVTE_SBHD else 1] * cp_size
        words = f"expected freqs tensor has a longer sequence length than input ({length})"
        _require(length <= freqs.shape[0], words, freqs.shape[0])
    words = f"expected the last dim of the input tensor ({x.shape[-1]}) equals or is greater than the freqs tensor"
    _require(x.shape[-1] >= freqs.shape[3], words, freqs.shape[3])


def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Rotate the first `r` features of each head by the angles of their position, and copy the others.

    input: `[s, b, h, d]`, `[b, s, h, d]` or `[t, h, d]` by `qkv_format`, any strides. freqs: angles `[s2, 1, 1, r]`
    of positions 0 to s2. start_positions: int32 `[b]`, position of each sequence's first token, or None for 0.
    The two features of a pair are r / 2 apart, or side by side with `interleaved`. cu_seqlens: for thd, cumulative
    lengths `[b + 1]` over all context-parallel ranks. Returns a contiguous tensor of input's shape and dtype.
    """
    _check(input, freqs, start_positions, qkv_format, cu_seqlens, cp_size)
    angles = _angles(input, freqs, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    return _rotated(input, _Rotation.of(angles, interleaved, backward=False))


def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Tensor | None,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Gradient of `fused_rope_forward`: the inverse rotation, with the same arguments."""
    _check(output_grads, freqs, start_positions, qkv_format, cu_seqlens, cp_size)
    angles = _angles(output_grads, freqs, start_positions, qkv_format, cu_seqlens, cp_size, cp_rank)
    return _rotated(output_grads, _Rotation.of(angles, interleaved, backward=True))


def fused_qkv_rope_forward(
    qkv_input: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    start_positions: Tensor | None,
    qkv_split_arg_list: Sequence[int],
    qkv_format: Any,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split packed q, k, v and rotate q and k as `fused_rope_forward` does.

    qkv_input: `[s, b, g, nq * d + 2 * d]` (or batch first): per group g its nq query heads, a key and a value head.
    qkv_split_arg_list: the three sizes of the last axis, `[nq * d, d, d]`. q_freqs, k_freqs: `[s2, 1, 1, r]`.
    Returns contiguous q `[s, b, g * nq, d]`, k and v `[s, b, g, d]`.
    """
    _check_freqs(q_freqs)
    _check_freqs(k_freqs)
    _require(qkv_input.dim() == 4, "expected 4D input tensor", list(qkv_input.shape))
    _require(qkv_input.is_contiguous(), "input tensor must be contiguous", qkv_input.stride())
    q, k, v = qkv_input.split(list(qkv_split_arg_list), dim=-1)
    q = q.unflatten(-1, (-1, qkv_split_arg_list[1]))
    common = (start_positions, qkv_format, None, cp_size, cp_rank)
    q_rotation = _Rotation.of(_angles(q, q_freqs, *common).unsqueeze(3), interleaved, backward=False)
    k_rotation = _Rotation.of(_angles(k, k_freqs, *common), interleaved, backward=False)
    return _rotated(q, q_rotation).flatten(2, 3), _rotated(k, k_rotation), v.contiguous()


def fused_qkv_rope_backward(
    q_grad_out: Tensor,
    k_grad_out: Tensor,
    v_grad_out: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: Sequence[int],
    qkv_format: Any,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
) -> Tensor:
    """Gradient of `fused_qkv_rope_forward` from the gradients of its three outputs, in qkv_input's shape."""
    q_grads = q_grad_out.unflatten(2, (k_grad_out.shape[2], -1))
    common = (None, qkv_format, None, cp_size, cp_rank)
    q_rotation = _Rotation.of(_angles(q_grads, q_freqs, *common).unsqueeze(3), interleaved, backward=True)
    k_rotation = _Rotation.of(_angles(k_grad_out, k_freqs, *common), interleaved, backward=True)
    dq, dk = _rotated(q_grads, q_rotation).flatten(-2), _rotated(k_grad_out, k_rotation)
    if [dq.shape[-1], dk.shape[-1], v_grad_out.shape[-1]] != list(qkv_split_arg_list):
        raise ValueError(f"gradients {dq.shape}, {dk.shape}, {v_grad_out.shape} do not split as {qkv_split_arg_list}")
    return torch.cat((dq, dk, v_grad_out), dim=-1)
