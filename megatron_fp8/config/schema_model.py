"""The `model` and `precision` sections of the config: every field, its unit and its range.

Knows nothing of other sections; what must hold between fields is in `config/check.py`. Imports no torch.
"""

from typing import Annotated, Literal

from pydantic import Field

from megatron_fp8.config.limits import (
    FP32_SMALLEST_NORMAL,
    MAX_DIVISIBLE_BY,
    MAX_DROPOUT,
    MAX_EPSILON,
    MAX_ERROR,
    MAX_FEATURES,
    MAX_HEADS,
    MAX_HISTORY,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_ROTARY_BASE,
    MAX_STD,
    MAX_STEPS,
    MAX_VOCABULARY,
    MIN_ROTARY_BASE,
    MIN_STD,
    Place,
)
from megatron_fp8.config.schema_run import Section


class ModelConfig(Section):
    """A decoder-only transformer, in Megatron's argument names."""

    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    """Transformer layers of the whole model, over all pipeline stages."""
    hidden_size: int = Field(ge=1, le=MAX_FEATURES)
    """Width of the residual stream, in features."""
    num_attention_heads: int = Field(ge=1, le=MAX_HEADS)
    """Query heads of each attention block, over all tensor-parallel ranks."""
    num_query_groups: int | None = Field(default=None, ge=1, le=MAX_HEADS)
    """Key/value heads (grouped-query attention); null: as many as `num_attention_heads`."""
    kv_channels: int | None = Field(default=None, ge=1, le=MAX_FEATURES)
    """Features per head; null: hidden_size / num_attention_heads."""
    ffn_hidden_size: int | None = Field(default=None, ge=1, le=MAX_FEATURES)
    """Width of the MLP's inner layer in features; null: 4 x hidden_size."""
    seq_length: int = Field(ge=1, le=MAX_POSITIONS)
    """Tokens per training sample."""
    max_position_embeddings: int | None = Field(default=None, ge=1, le=MAX_POSITIONS)
    """Rows of the learned position table, in tokens; null: seq_length. With RoPE, only the maximum length that an
    exported model states."""
    position_embedding_type: Literal["rope", "learned_absolute"] = "rope"
    """Position embedding."""
    rotary_base: float = Field(default=10000.0, ge=MIN_ROTARY_BASE, le=MAX_ROTARY_BASE)
    """RoPE's base: the longest wavelength is 2 pi x rotary_base tokens."""
    rotary_percent: float = Field(default=1.0, gt=0, le=1)
    """Share of each head's features that RoPE rotates."""
    rotary_interleaved: bool = False
    """Rotate neighboring features (GPT-J, GLM); false: each feature of a head's first half with one of the second."""
    rotary_base_local: float | None = Field(default=None, ge=MIN_ROTARY_BASE, le=MAX_ROTARY_BASE)
    """RoPE's base in layers with a sliding window, which have no rope_scaling then (Gemma 3); null: rotary_base."""
    no_rope_freq: list[int] | None = None
    """Layers without RoPE: a number N: every N-th; or one number a layer, 1: no RoPE."""
    rope_scaling_type: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = "none"
    """How RoPE's frequencies are scaled for longer sequences, as `transformers` defines it."""
    rope_scaling_factor: float | None = Field(default=None, ge=1, le=MAX_POSITIONS)
    """Sequence length over the original one; required by every rope_scaling_type but longrope."""
    original_max_position_embeddings: int | None = Field(default=None, ge=1, le=MAX_POSITIONS)
    """Tokens of a sequence before RoPE was scaled; null: max_position_embeddings."""
    rope_low_freq_factor: float = Field(default=1.0, gt=0, le=MAX_POSITIONS)
    """llama3: wavelengths above original_max_position_embeddings over this are scaled in full."""
    rope_high_freq_factor: float = Field(default=4.0, gt=0, le=MAX_POSITIONS)
    """llama3: wavelengths below original_max_position_embeddings over this are not scaled."""
    rope_beta_fast: float = Field(default=32.0, gt=0, le=MAX_POSITIONS)
    """yarn: features that make more rotations than this over the original length are not scaled."""
    rope_beta_slow: float = Field(default=1.0, gt=0, le=MAX_POSITIONS)
    """yarn: features that make fewer rotations than this over the original length are scaled in full."""
    rope_truncate: bool = True
    """yarn: round the two bounds between features to whole features."""
    rope_attention_factor: float | None = Field(default=None, gt=0, le=MAX_POSITIONS)
    """yarn, longrope: factor on rotated queries and keys; null: what the scaling's paper derives from its factor."""
    rope_short_factor: list[float] | None = None
    """longrope: divisor of each frequency where seq_length is at most original_max_position_embeddings."""
    rope_long_factor: list[float] | None = None
    """longrope: divisor of each frequency where seq_length is longer."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm"
    """Kind of every norm."""
    norm_epsilon: float = Field(default=1e-5, ge=FP32_SMALLEST_NORMAL, le=MAX_EPSILON)
    """Added to the variance inside every norm."""
    layernorm_zero_centered_gamma: bool = False
    """Norms multiply by 1 + weight, and the weights start at 0 (Gemma, Nemotron)."""
    norm_affine: bool = True
    """Norms learn a weight, and LayerNorm a bias; false: norms learn nothing (OLMo 1)."""
    norm_placement: Literal["pre", "post", "pre_and_post"] = "pre"
    """Norms of attention and MLP: on their inputs, on their outputs before these are added (OLMo 2), or on both
    (Gemma 2)."""
    qk_layernorm: Literal["none", "per_head", "per_head_after_rope", "all_heads"] = "none"
    """Norm of queries and keys: of each head, before RoPE (Qwen 3) or after it, or of all heads together (OLMo 2)."""
    parallel_attention_mlp: Literal["none", "separate_norms", "shared_norm"] = "none"
    """Attention and MLP read the same input and are added together, with a norm each (GPT-NeoX) or one for both
    (Phi)."""
    activation: Literal[
        "gelu", "geglu", "relu", "reglu", "srelu", "swiglu", "silu", "qgelu", "exact_gelu", "exact_geglu"
    ] = "swiglu"
    """MLP activation; gated ones double the rows of the first MLP weight. gelu, geglu: by tanh, in Transformer
    Engine's fused kernels; exact_gelu, exact_geglu: by erf, in torch's."""
    add_bias_linear: bool = False
    """Biases on the linear layers of the blocks."""
    add_qkv_bias: bool | None = None
    """Biases on QKV; null: add_bias_linear."""
    add_mlp_bias: bool | None = None
    """Biases in the MLP; null: add_bias_linear."""
    add_output_bias: bool = False
    """A bias on the logits."""
    window_size: list[int] | None = Field(default=None, min_length=2, max_length=2)
    """Sliding window of attention, `[left, 0]`: a token attends to itself and the `left` tokens before it; null: to
    all."""
    window_attn_skip_freq: list[int] | None = None
    """Layers that window_size leaves out: a number N: every N-th; or one number a layer, 1: window; null: none."""
    softmax_scale: float | None = Field(default=None, gt=0, le=MAX_FEATURES)
    """Factor on attention's scores; null: 1 / sqrt(features per head)."""
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    """Attention sink: none, 1 added to softmax's denominator, or exp of a number that each head learns (gpt-oss)."""
    attn_logit_softcapping: float | None = Field(default=None, gt=0, le=MAX_FEATURES)
    """Cap c of attention's scores s: c tanh(s / c); null: none."""
    final_logit_softcapping: float | None = Field(default=None, gt=0, le=MAX_FEATURES)
    """Cap c of the logits s: c tanh(s / c); null: none."""
    embedding_multiplier: float = Field(default=1.0, gt=0, le=MAX_FEATURES)
    """Factor on the word embeddings."""
    residual_multiplier: float = Field(default=1.0, gt=0, le=MAX_FEATURES)
    """Factor on what attention and MLP add to the residual stream."""
    logits_scaling: float = Field(default=1.0, gt=0, le=MAX_FEATURES)
    """What the logits are divided by."""
    untie_embeddings_and_output_weights: bool = True
    """Give the output layer its own weight; false: tie it to the word embedding."""
    fuse_qkv_params: bool = True
    """Store QKV as one weight; false: as three (query, key, value)."""
    hidden_dropout: float = Field(default=0.0, ge=0, le=MAX_DROPOUT)
    """Dropout probability on the embedding and on each block's output."""
    attention_dropout: float = Field(default=0.0, ge=0, le=MAX_DROPOUT)
    """Dropout probability on the attention probabilities."""
    init_method_std: float = Field(default=0.02, ge=MIN_STD, le=MAX_STD)
    """Standard deviation of the normal initialization; output projections: over sqrt(2 x num_layers)."""
    vocab_size: int | None = Field(default=None, ge=1, le=MAX_VOCABULARY)
    """Tokens of the vocabulary before padding; null: the tokenizer's size."""
    make_vocab_size_divisible_by: int = Field(default=128, ge=1, le=MAX_DIVISIBLE_BY)
    """The vocabulary is padded to a multiple of this times tensor_model_parallel_size."""
    hf_model_type: str | None = None
    """`model_type` of the Hugging Face family that an export takes if it can hold the model; null: the first that
    can."""
    recompute_granularity: Literal["none", "full"] = "none"
    """`full`: store only each layer's input and recompute the layer in the backward pass."""
    recompute_num_layers: int | None = Field(default=None, ge=0, le=MAX_LAYERS)
    """With `full`: how many layers of each pipeline stage's chunk are recomputed; null: all."""


MomentFormat = Literal["fp32", "fp16", "bf16", "fp8"]
# A loss scale and its inverse are FP32 numbers; beyond these one of them is infinite or zero, and every step overflows.
_SMALLEST_LOSS_SCALE, _LARGEST_LOSS_SCALE = 2.0**-100, 2.0**100


class PrecisionConfig(Section):
    """Number formats of GEMMs, master weights and moments; how FP8 scales are computed and monitored."""

    mode: Literal["fp32", "fp16", "bf16", "fp8"] = "bf16"
    """Format of the blocks' GEMMs: fp32, fp16 (with loss scaling), bf16, or fp8 (BF16 elsewhere)."""
    from_accelerate: Annotated[str | None, Place.FILE] = None
    """Path of a Hugging Face Accelerate YAML whose `mixed_precision` and `fp8_config` set this section's defaults,
    relative to the working directory."""

    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "delayed"
    """How FP8 scales are computed. delayed: from the amax history of earlier steps; tensorwise: from each tensor's
    current amax; blockwise: one per 1x128 (activations, gradients) or 128x128 (weights) block; mxfp8: one power of two
    per 32 elements (on GPUs Blackwell or later)."""
    fp8_format: Literal["hybrid", "e4m3"] | None = None
    """hybrid: E4M3 in the forward pass, E5M2 in the backward; e4m3: E4M3 in both. null: hybrid with delayed and
    tensorwise, e4m3 with blockwise and mxfp8."""
    fp8_margin: int = Field(default=0, ge=0, le=16)
    """Headroom of a delayed scale, in powers of two."""
    fp8_interval: int = Field(default=1, ge=1, le=MAX_STEPS)
    """Optimizer steps between updates of the delayed scales; amax histories advance every step."""
    fp8_amax_history_len: int = Field(default=1024, ge=1, le=MAX_HISTORY)
    """Steps of amax history for delayed scaling."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Amax that the scale is computed from: the history's maximum, or its newest entry."""
    amax_reduction: Literal["auto", "data_parallel", "tensor_and_data_parallel", "off"] = "auto"
    """Ranks over which amaxes are max-reduced. auto: data-parallel (with context-parallel) ranks, and tensor-parallel
    ones if there are several."""
    override_linear_precision: list[bool] = Field(default_factory=lambda: [False] * 3, min_length=3, max_length=3)
    """GEMMs of FP8 layers that run in BF16 instead: [fprop, dgrad, wgrad]."""
    fp8_eval: bool = True
    """Evaluate in FP8, as in training; false: in BF16."""
    fp8_param_gather: bool = False
    """Keep the weights of FP8 layers only in FP8 (master weights in FP32), and gather updated weights as FP8 bytes."""

    first_last_layers_bf16: bool = False
    """Run the first and the last transformer layers of the whole model in BF16."""
    num_layers_at_start_in_bf16: int = Field(default=1, ge=0, le=MAX_LAYERS)
    """First layers that first_last_layers_bf16 covers."""
    num_layers_at_end_in_bf16: int = Field(default=1, ge=0, le=MAX_LAYERS)
    """Last layers that first_last_layers_bf16 covers."""
    bf16_layers: list[int] = Field(default_factory=list)
    """More transformer layers to run in BF16, numbered from 0 over the whole model."""

    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Format of the master weights."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of the gradients that the optimizer reads."""
    exp_avg_dtype: MomentFormat = "fp32"
    """Format of Adam's first moment."""
    exp_avg_sq_dtype: MomentFormat = "fp32"
    """Format of Adam's second moment. fp8 flushes small values to zero, which makes single weights jump."""

    loss_scale: float | None = Field(default=None, ge=_SMALLEST_LOSS_SCALE, le=_LARGEST_LOSS_SCALE)
    """Constant loss scale for fp16; null: dynamic."""
    initial_loss_scale: float = Field(default=2.0**32, ge=_SMALLEST_LOSS_SCALE, le=_LARGEST_LOSS_SCALE)
    """Dynamic loss scale of the first step."""
    min_loss_scale: float = Field(default=1.0, ge=_SMALLEST_LOSS_SCALE, le=_LARGEST_LOSS_SCALE)
    """Lowest dynamic loss scale."""
    loss_scale_window: int = Field(default=1000, ge=1, le=MAX_STEPS)
    """Consecutive steps without overflow after which the dynamic loss scale doubles."""
    hysteresis: int = Field(default=2, ge=1, le=MAX_STEPS)
    """Overflows since the dynamic loss scale last grew before it halves; it then halves at every further one."""

    fp8_health_interval: int = Field(default=100, ge=0, le=MAX_STEPS)
    """Optimizer steps between FP8 health checks (share clipped, share flushed to zero, relative error of every FP8
    tensor); 0: never."""
    fp8_fallback: bool = False
    """Let a layer fall back to BF16 when fp8_fallback_num_checks consecutive checks find one of its tensors over a
    limit."""
    fp8_fallback_num_checks: int = Field(default=3, ge=1, le=MAX_STEPS)
    """Consecutive checks over a limit before a layer falls back."""
    fp8_fallback_num_healthy_checks: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Consecutive healthy checks (of what FP8 would do) after which a layer returns to FP8; 0: never."""
    fp8_fallback_max_clipped: float = Field(default=0.01, ge=0, le=1)
    """Limit on the share of elements clipped at the format's largest value."""
    fp8_fallback_max_flushed: float = Field(default=0.5, ge=0, le=1)
    """Limit on the share of non-zero elements flushed to zero."""
    fp8_fallback_max_error: float = Field(default=0.2, gt=0, le=MAX_ERROR)
    """Limit on the relative quantization error, ||x - q(x)|| / ||x||."""
