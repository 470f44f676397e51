"""Makes a stage's modules from the config: embedding, blocks, final norm, head.

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
from transformer_engine.pytorch.attention import InferenceParams

from megatron_fp8.model.block import Block
from megatron_fp8.model.block_shape import BlockShape


@dataclass(frozen=True)
class LayerFactory(BlockShape):
    """Makes the modules of a stage."""

    @property
    def seq_length(self) -> int:
        """Tokens per sample, over all ranks."""
        return self.model.seq_length

    def num_recomputed(self, num_layers: int) -> int:
        """How many of a stage's `num_layers` layers, from its first, are recomputed in the backward pass."""
        if self.model.recompute_granularity == "none":
            return 0
        return num_layers if self.model.recompute_num_layers is None else self.model.recompute_num_layers

    def layer(self, index: int) -> Block:
        """The block with global number `index`, from 0."""
        return Block(self, index)

    def final_norm(self) -> nn.Module:
        """The norm before the head."""
        return self.make_norm(self.model.hidden_size)

    def output_layer(self, padded_vocab_size: int) -> te.Linear:
        """The head: column-parallel, logits stay divided; outside the FP8 region, so in the parameters' dtype."""
        return te.Linear(
            self.model.hidden_size,
            padded_vocab_size,
            bias=self.model.add_output_bias,
            parallel_mode="column",
            name="output_layer",
            **{**self.linear, "fuse_wgrad_accumulation": True},
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
        self,
        config: TransformerConfig,
        padded_vocab_size: int,
        num_positions: int | None,
        tp: ProcessGroup,
        multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self._sequence_parallel = config.sequence_parallel
        self._deterministic = config.deterministic_mode
        self._tp = tp
        self.word_embeddings = tensor_parallel.VocabParallelEmbedding(
            padded_vocab_size, config.hidden_size, init_method=config.init_method, config=config, tp_group=tp
        )
        # In the parameters' format, as Gemma was trained: its factor, sqrt(hidden_size), is seldom a BF16 number.
        self._multiplier = float(torch.tensor(multiplier, dtype=self.word_embeddings.weight.dtype))
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
        if self._multiplier != 1.0:
            hidden = hidden * self._multiplier
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
