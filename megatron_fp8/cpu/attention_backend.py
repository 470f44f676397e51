"""Sends FP32 attention through the fused kernel too.

Transformer Engine has fused attention for 16-bit inputs only and takes FP32 through its unfused path, with `[s, s]`
scores. On the CPU the fused kernel computes in FP32 anyway. What the kernel cannot do stays with Transformer Engine.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.enums import (
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from megatron_fp8.cpu.kernels.attention import fused_attn_bwd, fused_attn_fwd

_MASKS = {"no_mask": NVTE_Mask_Type.NVTE_NO_MASK, "causal": NVTE_Mask_Type.NVTE_CAUSAL_MASK}
_LAYOUTS = {
    "sbhd": (NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD, NVTE_QKV_Format.NVTE_SBHD),
    "bshd": (NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, NVTE_QKV_Format.NVTE_BSHD),
}


class _FusedAttention(torch.autograd.Function):
    """The fused kernel as a differentiable function of q, k, v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, dropout: float, mask: str, axes: str) -> Tensor:
        layout, axes_format = _LAYOUTS[axes]
        length = q.shape[axes.index("s")]
        shared = (layout, axes_format, axes_format)
        kind = (NVTE_Bias_Type.NVTE_NO_BIAS, _MASKS[mask], NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, (-1, -1), False)
        none = torch.empty(0)
        out, lse, rng_state = fused_attn_fwd(
            length, length, True, scale, dropout, False, *shared, *kind, none, none, q, k, v, q.dtype
        )
        ctx.save_for_backward(q, k, v, out, lse, rng_state)
        ctx.arguments = (length, scale, dropout, layout, axes_format, kind)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, rng_state = ctx.saved_tensors
        length, scale, dropout, layout, axes_format, kind = ctx.arguments
        formats = (layout, axes_format, axes_format, layout, axes_format, axes_format)
        none = torch.empty(0)
        dq, dk, dv = fused_attn_bwd(
            *(length, length, scale, dropout, False, *formats, *kind, True, none, none),
            *(q, k, v, out, grads[0], q.dtype, [lse, rng_state]),
        )
        return dq, dk, dv, None, None, None, None


def patch_unfused_attention(backends: ModuleType) -> None:
    """Let TE's `UnfusedDotProductAttention` use the fused kernel where that can do the same."""
    unfused = backends.UnfusedDotProductAttention
    original: Callable[..., Tensor] = unfused.forward

    def forward(self: Any, alibi_cache: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or not _fused_can(self, kwargs):
            return original(self, alibi_cache, q, k, v, *args, **kwargs)
        dropout = self.attention_dropout.p if self.training else 0.0
        with self.attention_dropout_ctx():
            out = _FusedAttention.apply(
                q, k, v, self.softmax_scale, dropout, kwargs["attn_mask_type"], _axes(kwargs["qkv_layout"])
            )
        return out.reshape(*out.shape[:-2], -1)

    unfused.forward = forward


def _axes(qkv_layout: str) -> str | None:
    first = qkv_layout.split("_")[0].replace("3", "").replace("2", "")
    return first if first in _LAYOUTS and all(part[:2] == first[:2] for part in qkv_layout.split("_")) else None


def _fused_can(self: Any, kwargs: dict[str, Any]) -> bool:
    return (
        kwargs.get("attn_mask_type") in _MASKS
        and _axes(kwargs.get("qkv_layout", "")) is not None
        and kwargs.get("window_size") in (None, (-1, -1), (-1, 0))
        and kwargs.get("core_attention_bias_type", "no_bias") == "no_bias"
        and kwargs.get("softcap", 0.0) == 0.0
        and kwargs.get("inference_params") is None
        and not kwargs.get("fp8", False)
        and not kwargs.get("fp8_output", False)
        and self.softmax_type == "vanilla"
        and not self.return_max_logit
        and not self.apply_qk_layer_scaling
    )
