"""Rules for the model's form: windows, RoPE and its scaling, norms, and which of them go together. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_fp8.config.facts import Alternative, Facts, Finding
from megatron_fp8.config.layout import LayoutError, rotary_dim
from megatron_fp8.config.schema import ModelConfig

WINDOW = "model.window_size"
SCALING = "model.rope_scaling_type"


def check_model_form(facts: Facts) -> Iterator[Finding]:
    """Every mistake among these."""
    model = facts.config.model
    yield from _windows(model)
    yield from _pattern("model.window_attn_skip_freq", model.window_attn_skip_freq, model.num_layers)
    yield from _pattern("model.no_rope_freq", model.no_rope_freq, model.num_layers)
    if model.position_embedding_type == "rope":
        yield from _scaling(model)
    yield from _norms(model)


def _windows(model: ModelConfig) -> Iterator[Finding]:
    window = model.window_size
    if window is not None and (window[0] < 0 or window[1] != 0):
        reason = "a token attends to the ones before it only: [left, 0] with left at least 0"
        yield Finding("window", WINDOW, reason, (Alternative(WINDOW, [[abs(window[0]), 0], None]),))
    if window is None and model.rotary_base_local is not None:
        reason = f"it is RoPE's base in layers with a window, and {WINDOW} is null"
        alternatives = (Alternative("model.rotary_base_local", [None]),)
        yield Finding("local base", "model.rotary_base_local", reason, alternatives, f"{WINDOW}=[N,0]")


def _pattern(key: str, frequency: Sequence[int] | None, num_layers: int) -> Iterator[Finding]:
    if frequency is None:
        return
    if len(frequency) == 1:
        if frequency[0] < 1:
            reason = "a single number N means every N-th layer, so it is at least 1"
            yield Finding("layer pattern", key, reason, (Alternative(key, [None]),), f"{key}=N")
    elif len(frequency) != num_layers or not set(frequency) <= {0, 1}:
        reason = f"a list has one 0 or 1 for each of the {num_layers} layers"
        yield Finding("layer pattern", key, reason, (Alternative(key, [None]),), f"{key}=N for every N-th layer")


def _scaling(model: ModelConfig) -> Iterator[Finding]:
    kind = model.rope_scaling_type
    if kind not in ("none", "longrope") and model.rope_scaling_factor is None:
        reason = f"{SCALING} is {kind}, which scales RoPE by it"
        yield Finding("rope factor", "model.rope_scaling_factor", reason, (), "model.rope_scaling_factor=FACTOR")
    if kind == "llama3" and model.rope_low_freq_factor >= model.rope_high_freq_factor:
        reason = f"not less than model.rope_high_freq_factor={model.rope_high_freq_factor:g}"
        yield Finding("rope bands", "model.rope_low_freq_factor", reason, (), "the values of the model's config.json")
    if kind == "yarn" and model.rope_beta_slow >= model.rope_beta_fast:
        reason = f"not less than model.rope_beta_fast={model.rope_beta_fast:g}"
        yield Finding("rope bands", "model.rope_beta_slow", reason, (), "the values of the model's config.json")
    if kind in ("llama3", "yarn", "longrope") and model.original_max_position_embeddings is None:
        reason = f"{SCALING} is {kind}, which needs the length that the model was trained on before"
        key = "model.original_max_position_embeddings"
        yield Finding("rope length", key, reason, (), f"{key}=TOKENS")
    try:
        pairs = rotary_dim(model) // 2
    except LayoutError:  # reported as "head size"
        return
    if kind == "dynamic" and pairs < 2:
        reason = "dynamic scaling needs at least two pairs of rotated features"
        yield Finding("rope pairs", SCALING, reason, (Alternative(SCALING, ["none"]),))
    for name in ("rope_short_factor", "rope_long_factor"):
        factors = getattr(model, name)
        if kind == "longrope" and (factors is None or len(factors) != pairs or min(factors) <= 0):
            reason = f"longrope needs {pairs} positive numbers, one for each pair of rotated features"
            yield Finding("rope factors", f"model.{name}", reason, (), "the list of the model's config.json")


def _norms(model: ModelConfig) -> Iterator[Finding]:
    placement, parallel = model.norm_placement, model.parallel_attention_mlp
    if parallel == "shared_norm" and placement == "post":
        reason = "it is the norm of attention's and the MLP's input, and model.norm_placement=post has none there"
        key = "model.parallel_attention_mlp"
        others = (Alternative(key, ["separate_norms", "none"]), Alternative("model.norm_placement", ["pre"]))
        yield Finding("shared norm", key, reason, others)
    if model.qk_layernorm == "all_heads" and (
        model.normalization != "RMSNorm" or model.layernorm_zero_centered_gamma or not model.norm_affine
    ):
        reason = "the norm over all heads is an RMSNorm with weights that start at 1"
        for_all = (
            Alternative("model.qk_layernorm", ["per_head"]),
            Alternative("model.normalization", ["RMSNorm"]),
            Alternative("model.layernorm_zero_centered_gamma", [False]),
            Alternative("model.norm_affine", [True]),
        )
        yield Finding("norm of all heads", "model.qk_layernorm", reason, for_all)
    if model.qk_layernorm != "none" and _scales_a_share(model):
        reason = "scaled RoPE that rotates a share of each head takes its place in the layer"
        apart = (
            Alternative("model.qk_layernorm", ["none"]),
            Alternative("model.rotary_percent", [1.0]),
            Alternative("model.rope_attention_factor", [1.0]),
        )
        yield Finding("norm and scale", "model.qk_layernorm", reason, apart)


def _scales_a_share(model: ModelConfig) -> bool:
    scaled = model.rope_scaling_type in ("yarn", "longrope") and model.rope_attention_factor != 1.0
    return model.position_embedding_type == "rope" and scaled and model.rotary_percent < 1
