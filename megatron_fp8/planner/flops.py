"""Owns the count of floating-point operations: of a token exactly for the architecture, and of a step's GEMMs.

2 for each multiply-add of a matrix product; norms, activations, softmax and RoPE are not counted, as in every published
count. Attention is causal: a query reads itself and the tokens before it, (s + 1) / 2 keys on average. Counts that take
all s keys (PaLM's appendix B, Narayanan et al. 2021, equation 3) come out higher. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fp8.config.layout import GemmShape, Layout, block_parameters
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.stages import num_recomputed

# A backward pass multiplies twice: for the input's gradient and for the weight's (or for the other operand's).
_BACKWARD = 2.0


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs of one token over all ranks. `linear`, `attention` and `head` are the three parts of a forward pass.

    `recompute`: second forward passes of recomputed layers. `scores_again`: fused attention's backward pass computes
    the scores once more. `all_keys`: what attention's forward pass would be with all s keys a query.
    """

    linear: float
    attention: float
    head: float
    recompute: float
    scores_again: float
    all_keys: float

    @property
    def forward(self) -> float:
        """One forward pass."""
        return self.linear + self.attention + self.head

    @property
    def backward(self) -> float:
        """One backward pass, without what is computed again."""
        return _BACKWARD * self.forward

    @property
    def model(self) -> float:
        """What the model needs, however it is computed; MFU counts this."""
        return self.forward + self.backward

    @property
    def hardware(self) -> float:
        """What is computed."""
        return self.model + self.recompute + self.scores_again

    @property
    def model_with_all_keys(self) -> float:
        """`model` as it is counted where causality is not."""
        return (1 + _BACKWARD) * (self.linear + self.all_keys + self.head)


def flops_per_token(config: Config, layout: Layout) -> FlopsPerToken:
    """FLOPs of one token of a full-length sample; documents kept apart make attention's share smaller."""
    model = config.model
    weights = sum(shape.size for shape in block_parameters(model) if shape.is_gemm_weight)
    linear = 2.0 * model.num_layers * weights
    features = model.num_attention_heads * layout.kv_channels
    # Scores and their product with the values.
    per_key = 2 * 2.0 * model.num_layers * features
    attention = per_key * (model.seq_length + 1) / 2
    chunks = layout.pipeline_model_parallel_size * layout.num_chunks
    share = num_recomputed(config, layout.layers_per_chunk) * chunks / model.num_layers
    return FlopsPerToken(
        linear=linear,
        attention=attention,
        head=2.0 * model.hidden_size * layout.padded_vocab_size,
        recompute=share * (linear + attention),
        scores_again=attention / 2,
        all_keys=per_key * model.seq_length,
    )


def step_gemms(layout: Layout, num_layers: int) -> list[tuple[GemmShape, int]]:
    """Linear layers of the model, the head included, and how often a step passes through each."""
    block = layout.gemms
    head = GemmShape("head", layout.tokens_per_microbatch, block[0].in_features, layout.padded_vocab_size)
    return [*((shape, num_layers * layout.num_microbatches) for shape in block), (head, layout.num_microbatches)]


def step_flops(layout: Layout, num_layers: int) -> int:
    """FLOPs of a step's linear layers and head: forward, dgrad and wgrad."""
    return sum(
        6 * count * shape.num_tokens * shape.in_features * shape.out_features
        for shape, count in step_gemms(layout, num_layers)
    )
