"""The attention of a block: Transformer Engine's, with what its arguments cannot say."""

from __future__ import annotations

import torch
import transformer_engine.pytorch as te
from megatron.core import tensor_parallel
from torch import nn

from megatron_fp8.config.layer_kinds import has_rope, qkv_has_bias, rope_attention_factor, uses_local_rope
from megatron_fp8.model.block_shape import BlockShape, zeros
from megatron_fp8.model.head_norms import AllHeadsRMSNorm, RotatedFeatureScale


class SelfAttention(te.MultiheadAttention):  # type: ignore[misc]
    """The attention of the block with global number `index`, from 0.

    `return_bias`: the last bias is returned beside the output, not added.
    """

    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(self, shape: BlockShape, index: int, name: str, return_bias: bool) -> None:
        model, layout = shape.model, shape.layout
        super().__init__(
            model.hidden_size,
            model.num_attention_heads,
            kv_channels=layout.kv_channels,
            num_gqa_groups=layout.num_query_groups,
            attention_dropout=model.attention_dropout,
            layernorm_epsilon=model.norm_epsilon,
            output_layer_init_method=zeros,
            layer_number=index + 1,
            bias=qkv_has_bias(model),
            return_bias=return_bias,
            input_layernorm=shape.has_pre_norms,
            normalization=model.normalization,
            zero_centered_gamma=model.layernorm_zero_centered_gamma,
            set_parallel_mode=True,
            fuse_qkv_params=model.fuse_qkv_params,
            rotary_pos_interleaved=model.rotary_interleaved,
            qk_norm_before_rope=model.qk_layernorm != "per_head_after_rope",
            softmax_type=model.softmax_type,
            qkv_format="sbhd",
            name=name,
            **shape.linear,
        )
        if shape.has_pre_norms:
            shape.finish_norm(self.layernorm_qkv)
        if model.add_bias_linear != qkv_has_bias(model):
            self.proj = te.Linear(
                layout.kv_channels * model.num_attention_heads,
                model.hidden_size,
                bias=model.add_bias_linear,
                return_bias=return_bias,
                parallel_mode="row",
                name=f"{name}.proj",
                **shape.linear,
            )
        self._set_head_norms(shape)
        self._set_core(shape, index, f"{name}.core_attention")

    def _set_head_norms(self, shape: BlockShape) -> None:
        model, layout = shape.model, shape.layout
        if model.qk_layernorm == "all_heads":
            heads = (layout.attention_heads_per_rank, layout.query_groups_per_rank)
            self.q_norm, self.k_norm = (
                AllHeadsRMSNorm(n * layout.kv_channels, model.norm_epsilon, shape.tp, shape.dtype, shape.device)
                for n in heads
            )
        elif model.qk_layernorm != "none":
            # Registered by the names by which Megatron's `finalize_model_grads` knows parameters whose gradients it
            # must add up over the tensor-parallel ranks, each of which has some of the heads. Not of a divided
            # sequence: a rank normalizes all tokens of its heads.
            self.q_layernorm, self.k_layernorm = (
                shape.make_norm(layout.kv_channels, sequence_parallel=False) for _ in range(2)
            )
            self.fast_setattr("q_norm", self.q_layernorm)
            self.fast_setattr("k_norm", self.k_layernorm)

    def _set_core(self, shape: BlockShape, index: int, name: str) -> None:
        """Scores that are scaled otherwise, by the model or by its scaled RoPE, and sinks."""
        model, layout = shape.model, shape.layout
        rotated = has_rope(model, index) and not uses_local_rope(model, index)
        factor = rope_attention_factor(model) if rotated else 1.0
        if factor != 1.0 and model.rotary_percent < 1:
            self.q_norm = self.k_norm = RotatedFeatureScale(factor, layout.rotary_dim)
            factor = 1.0
        if model.softmax_scale is not None or factor != 1.0 or model.softmax_type == "learnable":
            # Queries and keys are both multiplied by RoPE's factor.
            scale = (model.softmax_scale or layout.kv_channels**-0.5) * factor**2
            self.core_attention = CoreAttention(shape, index, name, scale)


class CoreAttention(te.DotProductAttention):  # type: ignore[misc]
    """Attention proper, with the given factor on its scores."""

    def __init__(self, shape: BlockShape, index: int, name: str, softmax_scale: float) -> None:
        model, layout = shape.model, shape.layout
        super().__init__(
            model.num_attention_heads,
            layout.kv_channels,
            num_gqa_groups=layout.num_query_groups,
            attention_dropout=model.attention_dropout,
            qkv_format="sbhd",
            tp_size=shape.tp.size(),
            tp_group=shape.tp,
            get_rng_state_tracker=tensor_parallel.get_cuda_rng_tracker,
            sequence_parallel=shape.sequence_parallel,
            layer_number=index + 1,
            attention_type="self",
            softmax_type=model.softmax_type,
            softmax_scale=softmax_scale,
            name=name,
        )
        if model.softmax_type == "learnable":
            # A parameter like any other: TE's is in FP32, and not marked as divided over heads.
            heads = layout.attention_heads_per_rank
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=shape.dtype, device=shape.device))
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, dim=0, stride=1)
