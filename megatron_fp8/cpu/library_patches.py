"""Changes to Transformer Engine's and Megatron Core's Python on a CPU, each applied when its module is imported.

None changes what is computed. Imports neither library, and no torch: `install` needs the table before either.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def _fuse_fp32_attention(backends: ModuleType) -> None:
    """Let TE's `UnfusedDotProductAttention` run TE's `FusedAttnFunc` where that computes the same.

    TE's fused attention takes 16-bit inputs only, so FP32 goes through its unfused path, with `[s, s]` scores. On the
    CPU the fused kernel computes in FP32 anyway. `NVTE_FUSED_ATTN=0`, what the kernel cannot do, and 16-bit inputs for
    which TE itself chose that path, with its roundings, stay on it.
    """
    unfused = backends.UnfusedDotProductAttention
    original: Callable[..., Tensor] = unfused.forward

    def forward(self: Any, alibi_cache: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_fp32 = q.dtype == backends.torch.float32
        if args or not is_fp32 or not _is_fusable(self, backends.QuantizedTensorStorage, (q, k, v), kwargs):
            return original(self, alibi_cache, q, k, v, *args, **kwargs)
        arguments = _fused_arguments(self, q, k, v, kwargs)
        fused_args = backends.FusedAttnFwdArgs(
            **arguments, fused_attention_backend=backends.FusedAttnBackend.F16_arbitrary_seqlen
        )
        with self.attention_dropout_ctx():
            out: Tensor = backends.FusedAttnFunc.apply(q, k, v, None, kwargs.get("softmax_offset"), fused_args)
        return out.view(*out.shape[:-2], -1)

    unfused.forward = forward


def _is_fusable(self: Any, quantized: type, tensors: tuple[Tensor, ...], kwargs: dict[str, Any]) -> bool:
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
        and not self.return_max_logit
        and not self.apply_qk_layer_scaling
    )


def _fused_arguments(self: Any, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Fields of TE's `FusedAttnFwdArgs` except the backend: attention in the tensors' own precision."""
    absent = ("attn_bias", "softmax_offset", "page_table_k", "page_table_v", "packed_qkv", "packed_kv", "rng_gen")
    given = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "qkv_layout", "attn_mask_type")
    return {
        **dict.fromkeys(absent),
        **{name: kwargs[name] for name in given},
        "q": q,
        "k": k,
        "v": v,
        # Sequences padded to positions other than cu_seqlens never reach the unfused path.
        "cu_seqlens_q_padded": kwargs["cu_seqlens_q"],
        "cu_seqlens_kv_padded": kwargs["cu_seqlens_kv"],
        "is_training": self.training,
        "attn_scale": self.softmax_scale,
        "dropout_p": self.attention_dropout.p if self.training else 0.0,
        "fast_zero_fill": True,
        "attn_bias_type": "no_bias",
        "softmax_type": self.softmax_type,
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


def _register_custom_ops(custom_ops: ModuleType) -> None:
    """TE declares these operators for CUDA alone. They only call the extension, so they run on CPU tensors too."""
    from torch.library import CustomOpDef

    for operator in list(vars(custom_ops).values()):
        if isinstance(operator, CustomOpDef):
            operator.register_kernel("cpu", operator._init_fn)


def _disable_compile(jit: ModuleType) -> None:
    # torch.compile needs a C++ compiler and seconds per function; eager gives the same numbers.
    jit.disable_jit_fuser()


def _allow_mxfp8(quantization: ModuleType) -> None:
    """TE requires compute capability 10.0 for MXFP8, which the stand-in implements while reporting 9.0: 10.0 would also
    change the GEMM layouts of per-tensor FP8, the attention backend, and TE's default recipe."""

    def supported() -> tuple[bool, str]:
        return True, ""

    def default_recipe() -> object:
        # TE's choice at capability 9.0.
        return quantization.DelayedScaling()

    quantization._compute_mxfp8_support = supported  # type: ignore[attr-defined]
    quantization.get_default_fp8_recipe = default_recipe  # type: ignore[attr-defined]


def _skip_extension(common: ModuleType) -> None:
    """The extension for torch is in `sys.modules` already."""
    original = common.load_framework_extension

    def load_framework_extension(framework: str) -> None:
        if framework != "torch":
            original(framework)

    common.load_framework_extension = load_framework_extension  # type: ignore[attr-defined]


# By the module that each changes once it is imported.
LIBRARY_PATCHES = {
    "megatron.core.jit": _disable_compile,
    "transformer_engine.common": _skip_extension,
    "transformer_engine.pytorch.attention.custom_ops": _register_custom_ops,
    "transformer_engine.pytorch.attention.dot_product_attention.backends": _fuse_fp32_attention,
    "transformer_engine.pytorch.quantization": _allow_mxfp8,
}
