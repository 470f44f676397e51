"""The block: Transformer Engine's `TransformerLayer`, whose attention and MLP are made to the model's form.

Norms and factors on what they add to the residual stream, which the layer does not have, are here. Must not know
pipeline stages.
"""

from __future__ import annotations

import functools
from typing import Any

import transformer_engine.pytorch as te
from torch import nn

from megatron_fp8.config.layer_kinds import window_of
from megatron_fp8.model.block_shape import BlockShape
from megatron_fp8.model.mlp import SeparateMLP, make_mlp
from megatron_fp8.model.self_attention import SelfAttention


class Block(te.TransformerLayer):  # type: ignore[misc]
    """The block with global number `index`, from 0."""

    def __init__(self, shape: BlockShape, index: int) -> None:
        model, name = shape.model, f"layers.{index}"
        window = window_of(model, index)
        parallel = model.parallel_attention_mlp != "none"
        super().__init__(
            model.hidden_size,
            shape.layout.ffn_hidden_size,
            model.num_attention_heads,
            num_gqa_groups=shape.layout.num_query_groups,
            kv_channels=shape.layout.kv_channels,
            hidden_dropout=model.hidden_dropout,
            layer_number=index + 1,
            self_attn_mask_type="causal",
            window_size=None if window is None else (window, 0),
            softcap=model.attn_logit_softcapping or 0.0,
            parallel_attention_mlp=parallel,
            fuse_qkv_params=model.fuse_qkv_params,
            tp_group=shape.tp,
            tp_size=shape.tp.size(),
            sequence_parallel=shape.sequence_parallel,
            set_parallel_mode=True,
            attn_input_format="sbhd",
            # Its own attention and MLP are replaced, and never have memory.
            device="meta",
            name=name,
        )
        self.self_attention = SelfAttention(shape, index, f"{name}.self_attention", return_bias=not parallel)
        self.layernorm_mlp = make_mlp(shape, f"{name}.layernorm_mlp", return_bias=not parallel)
        if model.parallel_attention_mlp == "shared_norm":
            _share_norm(self.self_attention.layernorm_qkv, self.layernorm_mlp)
        has_post_norms = model.norm_placement != "pre"
        self.post_attention_norm = shape.make_norm(model.hidden_size) if has_post_norms else None
        self.post_mlp_norm = shape.make_norm(model.hidden_size) if has_post_norms else None
        if has_post_norms or model.residual_multiplier != 1.0:
            for part, norm in (
                (self.self_attention, self.post_attention_norm),
                (self.layernorm_mlp, self.post_mlp_norm),
            ):
                # Before `TransformerLayer` adds the output to the residual stream.
                part.register_forward_hook(functools.partial(_finish, norm, model.residual_multiplier))


def _finish(norm: nn.Module | None, multiplier: float, _module: nn.Module, _inputs: Any, output: Any) -> Any:
    """A forward hook: bias, norm and factor on what attention or MLP adds to the residual stream."""
    has_bias = isinstance(output, tuple)
    result, bias = output if has_bias else (output, None)
    if bias is not None and bias.numel():
        result = result + bias
    if norm is not None:
        result = norm(result)
    if multiplier != 1.0:
        result = result * multiplier
    return (result, None) if has_bias else result


def _share_norm(attention: nn.Module, mlp: nn.Module) -> None:
    """Make the MLP's norm that of attention: the same parameters, whose gradients autograd adds up."""
    holder = mlp.fc1 if isinstance(mlp, SeparateMLP) else mlp
    for name in ("layer_norm_weight", "layer_norm_bias"):
        if getattr(attention, name, None) is not None:
            setattr(holder, name, getattr(attention, name))
