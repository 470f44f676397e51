"""Sends attention that Transformer Engine would take unfused through the fused kernel.

Transformer Engine has fused attention for 16-bit inputs only and takes FP32 through its unfused path, with `[s, s]`
scores. On the CPU the fused kernel computes in FP32 anyway. What the kernel cannot do stays with Transformer Engine,
and so does everything where `NVTE_FUSED_ATTN=0` asks for the unfused path. Must not know how the kernel works.
"""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor


def patch_unfused_attention(backends: ModuleType) -> None:
    """Let TE's `UnfusedDotProductAttention` run TE's `FusedAttnFunc` where that computes the same.

    backends: `transformer_engine.pytorch.attention.dot_product_attention.backends`, just imported.
    """
    unfused = backends.UnfusedDotProductAttention
    original: Callable[..., Tensor] = unfused.forward

    def forward(self: Any, alibi_cache: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or not _fused_can(self, backends.QuantizedTensorStorage, (q, k, v), kwargs):
            return original(self, alibi_cache, q, k, v, *args, **kwargs)
        arguments = _fused_arguments(self, q, k, v, kwargs)
        fused_args = backends.FusedAttnFwdArgs(
            **arguments, fused_attention_backend=backends.FusedAttnBackend.F16_arbitrary_seqlen
        )
        with self.attention_dropout_ctx():
            out: Tensor = backends.FusedAttnFunc.apply(q, k, v, None, None, fused_args)
        return out.view(*out.shape[:-2], -1)

    unfused.forward = forward


def _fused_can(self: Any, quantized: type, tensors: tuple[Tensor, ...], kwargs: dict[str, Any]) -> bool:
    return (
        os.environ.get("NVTE_FUSED_ATTN", "1") != "0"
        and not any(isinstance(tensor, quantized) for tensor in tensors)
        and kwargs.get("attn_mask_type") != "arbitrary"
        and kwargs.get("core_attention_bias_type", "no_bias") == "no_bias"
        and kwargs.get("softcap", 0.0) == 0.0
        and not getattr(kwargs.get("inference_params"), "is_paged", False)
        and kwargs.get("cu_seqlens_q") is not None
        and kwargs.get("cu_seqlens_kv") is not None
        and not kwargs.get("fp8", False)
        and not kwargs.get("fp8_output", False)
        and self.softmax_type == "vanilla"
        and not self.return_max_logit
        and not self.apply_qk_layer_scaling
    )


def _fused_arguments(self: Any, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Fields of TE's `FusedAttnFwdArgs`, but for the backend: attention in the tensors' own precision."""
    absent = ("attn_bias", "softmax_offset", "page_table_k", "page_table_v", "packed_qkv", "packed_kv", "rng_gen")
    given = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "qkv_layout", "attn_mask_type")
    return {
        **dict.fromkeys(absent),
        **{name: kwargs[name] for name in given},
        "q": q,
        "k": k,
        "v": v,
        # Sequences that are padded to other places than cu_seqlens never reach the unfused path.
        "cu_seqlens_q_padded": kwargs["cu_seqlens_q"],
        "cu_seqlens_kv_padded": kwargs["cu_seqlens_kv"],
        "is_training": self.training,
        "attn_scale": self.softmax_scale,
        "dropout_p": self.attention_dropout.p if self.training else 0.0,
        "fast_zero_fill": True,
        "attn_bias_type": "no_bias",
        "softmax_type": "vanilla",
        "window_size": kwargs.get("window_size") or (-1, -1),
        "bottom_right_diagonal": kwargs.get("bottom_right_diagonal"),
        "deterministic": True,
        "use_FAv2_bwd": False,
        "return_max_logit": False,
        "fp8": False,
        "fp8_meta": None,
        "quantizers": None,
        "fp8_output": False,
        "bf16_backward": False,
        "layer_number": self.layer_number,
    }
