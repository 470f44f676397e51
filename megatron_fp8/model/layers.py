"""Makes Transformer Engine's modules from the config: blocks, final norm, head, rotary embedding.

Must not know pipeline stages or when the modules run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine.pytorch as te
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformer_engine.pytorch.attention import InferenceParams, RotaryPositionEmbedding

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import ModelConfig


def _zeros(weight: Tensor) -> Tensor:
    """The values come from `model/init.py`; until then zeros, since FP8 weights enter their amax into the history."""
    return nn.init.zeros_(weight)


@dataclass(frozen=True)
class LayerFactory:
    """Makes the modules of a stage; `tp` is the tensor-parallel group, `dtype` that of the parameters."""

    model: ModelConfig
    layout: Layout
    tp: ProcessGroup
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def seq_length(self) -> int:
        """Tokens per sample, over all ranks."""
        return self.model.seq_length

    def num_recomputed(self, num_layers: int) -> int:
        """How many of a stage's `num_layers` layers, from its first, are recomputed in the backward pass."""
        if self.model.recompute_granularity == "none":
            return 0
        return num_layers if self.model.recompute_num_layers is None else self.model.recompute_num_layers

    def layer(self, index: int) -> te.TransformerLayer:
        """The block with global number `index`, from 0."""
        model = self.model
        return te.TransformerLayer(
            model.hidden_size,
            self.layout.ffn_hidden_size,
            model.num_attention_heads,
            num_gqa_groups=self.layout.num_query_groups,
            kv_channels=self.layout.kv_channels,
            layernorm_epsilon=model.norm_epsilon,
            hidden_dropout=model.hidden_dropout,
            attention_dropout=model.attention_dropout,
            init_method=_zeros,
            output_layer_init_method=_zeros,
            layer_number=index + 1,
            self_attn_mask_type="causal",
            tp_group=self.tp,
            tp_size=self.tp.size(),
            params_dtype=self.dtype,
            get_rng_state_tracker=tensor_parallel.get_cuda_rng_tracker,
            # TE accumulates into main_grad inside the GEMM for the fused QKV weight only.
            fuse_wgrad_accumulation=model.fuse_qkv_params,
            fuse_qkv_params=model.fuse_qkv_params,
            sequence_parallel=self.sequence_parallel,
            set_parallel_mode=True,
            bias=model.add_bias_linear,
            activation=model.activation,
            normalization=model.normalization,
            attn_input_format="sbhd",
            device=self.device,
            name=f"layers.{index}",
        )

    def final_norm(self) -> nn.Module:
        """The norm before the head."""
        kind: type[nn.Module] = te.LayerNorm if self.model.normalization == "LayerNorm" else te.RMSNorm
        return kind(
            self.model.hidden_size,
            eps=self.model.norm_epsilon,
            sequence_parallel=self.sequence_parallel,
            dtype=self.dtype,
            device=self.device,
        )

    def output_layer(self, padded_vocab_size: int) -> te.Linear:
        """The head: column-parallel, logits stay divided; outside the FP8 region, so in the parameters' dtype."""
        return te.Linear(
            self.model.hidden_size,
            padded_vocab_size,
            bias=False,
            parallel_mode="column",
            tp_group=self.tp,
            tp_size=self.tp.size(),
            sequence_parallel=self.sequence_parallel,
            params_dtype=self.dtype,
            get_rng_state_tracker=tensor_parallel.get_cuda_rng_tracker,
            fuse_wgrad_accumulation=True,
            init_method=_zeros,
            device=self.device,
            name="output_layer",
        )

    def rotary(self) -> RotaryPositionEmbedding:
        """RoPE's angles."""
        rotated = self.layout.kv_channels
        return RotaryPositionEmbedding(
            rotated, rotary_percent=self.model.rotary_percent, rotary_base=self.model.rotary_base
        )


def set_qkv_format(layer: nn.Module, packed: bool) -> None:
    """Tell TE's `layer` whether its next inputs are packed documents `[t, h]`, or `[s, b, h]`.

    TE takes the mask as an argument of the call, but reads this from an attribute of the module at each call.
    """
    attention = layer.self_attention
    assert isinstance(attention, te.MultiheadAttention)
    attention.qkv_format = "thd" if packed else "sbhd"


def attention_arguments(
    cu_seqlens: Tensor | None, longest: int, cache: InferenceParams | None = None
) -> dict[str, Any]:
    """What a call of TE's layer takes for packed documents of at most `longest` tokens; nothing without them.

    `cu_seqlens`: int32 `[n + 1]`. A constant `longest` spares the search for the longest document, for which host and
    device would wait for each other, and another kernel for every length.
    """
    if cache is not None:
        # The cache knows each sample's length.
        return {"self_attn_mask_type": "padding_causal", "inference_params": cache}
    if cu_seqlens is None:
        return {}
    return {"self_attn_mask_type": "padding_causal", "cu_seqlens_q": cu_seqlens, "max_seqlen_q": longest}


class Embedding(nn.Module):
    """Vocabulary-parallel word embedding, plus a learned position table if `num_positions` is given."""

    def __init__(
        self, config: TransformerConfig, padded_vocab_size: int, num_positions: int | None, tp: ProcessGroup
    ) -> None:
        super().__init__()
        self._sequence_parallel = config.sequence_parallel
        self._deterministic = config.deterministic_mode
        self._tp = tp
        self.word_embeddings = tensor_parallel.VocabParallelEmbedding(
            padded_vocab_size, config.hidden_size, init_method=config.init_method, config=config, tp_group=tp
        )
        self.position_embeddings: nn.Embedding | None = None
        if num_positions is not None:
            weight = self.word_embeddings.weight
            self.position_embeddings = nn.Embedding(
                num_positions, config.hidden_size, device=weight.device, dtype=weight.dtype
            )
        self._dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Embed `tokens` `[b, s]`; returns `[s, b, h]`, or `[s / tp, b, h]` with sequence parallelism."""
        hidden = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            table = self.position_embeddings
            # As Megatron's word embedding does; torch makes the backward pass of indexing one of a fixed order.
            hidden = hidden + (table.weight[position_ids] if self._deterministic else table(position_ids))
        hidden = hidden.transpose(0, 1).contiguous()
        dropout: Callable[[Tensor], Tensor] = self._dropout
        if not self._sequence_parallel:
            return dropout(hidden)
        hidden = tensor_parallel.scatter_to_sequence_parallel_region(hidden, group=self._tp)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return dropout(hidden)
