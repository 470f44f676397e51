"""Small models of every family, with values that are legal and not the defaults.

The sizes are chosen so that nothing is square that need not be: a transposed or permuted weight shows.
"""

from __future__ import annotations

from typing import Any

import torch

SIZES = {
    "vocab_size": 283,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": None,
}
LLAMA = {**SIZES, "model_type": "llama"}
GPT2 = {"model_type": "gpt2", "vocab_size": 283, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 24}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
    "rope_theta": 500000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 8,
    "rope_theta": 10000.0,
}
FULL, SLIDING = "full_attention", "sliding_attention"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# Keys of SIZES that a class does not have: it would keep them, and ignore them.
LACKING = {"gpt_neox": {"num_key_value_heads"}, "falcon": {"num_key_value_heads", "intermediate_size"}}


def of(model_type: str, **values: Any) -> dict[str, Any]:
    sizes = {key: value for key, value in SIZES.items() if key not in LACKING.get(model_type, ())}
    return {**sizes, "model_type": model_type, **values}


MODELS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "llama": (LLAMA, BF16),
    "llama-tied-biases": (
        {
            **LLAMA,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "hidden_act": "gelu_pytorch_tanh",
        },
        FP32,
    ),
    "llama-3.1": ({**LLAMA, "rope_parameters": LLAMA3, "attention_bias": True}, BF16),
    "llama-linear": ({**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, BF16),
    "llama-yarn": ({**LLAMA, "rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}, "mlp_bias": True}, BF16),
    "llama-dynamic": ({**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
                       "max_position_embeddings": 12, "hidden_act": "gelu"}, BF16),
    "mistral": (of("mistral", hidden_size=60, sliding_window=5, head_dim=16), BF16),
    "mistral-no-window": (of("mistral", sliding_window=None, head_dim=24), FP32),
    "qwen2": (of("qwen2"), BF16),
    "qwen2-windows": (of("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1), BF16),
    "qwen3": (of("qwen3", head_dim=24, tie_word_embeddings=True), BF16),
    "qwen3-yarn": (of("qwen3", head_dim=16, attention_bias=True, rope_parameters=YARN), FP32),
    "gemma": (of("gemma", head_dim=24), BF16),
    "gemma2": (of("gemma2", head_dim=24, sliding_window=4, query_pre_attn_scalar=40, attn_logit_softcapping=2.0,
                  final_logit_softcapping=1.5), BF16),
    "gemma2-no-caps": (of("gemma2", head_dim=24, attn_logit_softcapping=None, final_logit_softcapping=None,
                          tie_word_embeddings=False, layer_types=[FULL, FULL], attention_bias=True), FP32),
    "gemma3": (of("gemma3_text", head_dim=24, sliding_window=4, query_pre_attn_scalar=40, num_hidden_layers=4,
                  layer_types=[SLIDING, FULL, SLIDING, SLIDING],
                  rope_parameters={FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                                   SLIDING: {"rope_type": "default", "rope_theta": 100.0}}), BF16),
    "phi": (of("phi", num_key_value_heads=8), FP16),
    "phi-qk-norm": (of("phi", qk_layernorm=True, tie_word_embeddings=False,
                       rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}),
                    FP32),
    "phi3": (of("phi3", sliding_window=6), BF16),
    "phi3-longrope": (of("phi3", rope_parameters={**LONGROPE, "partial_rotary_factor": 1.0},
                         original_max_position_embeddings=8), BF16),
    "phi4-mini": (of("phi3", tie_word_embeddings=True, hidden_size=128, original_max_position_embeddings=8,
                     rope_parameters={**LONGROPE, "partial_rotary_factor": 0.5}), BF16),
    "olmo": (of("olmo"), FP32),
    "olmo2": (of("olmo2", attention_bias=True), BF16),
    "gpt2": (GPT2, FP32),
    "gpt2-untied-relu": ({**GPT2, "tie_word_embeddings": False, "activation_function": "relu"}, FP16),
    "gpt_neox": (of("gpt_neox"), FP16),
    "gpt_neox-serial": (of("gpt_neox", use_parallel_residual=False, attention_bias=False, hidden_act="gelu_new",
                           tie_word_embeddings=True,
                           rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}),
                        FP32),
    "starcoder2": (of("starcoder2", sliding_window=5), BF16),
    "starcoder2-no-biases": (of("starcoder2", use_bias=False, tie_word_embeddings=False), FP32),
    "nemotron": (of("nemotron", head_dim=16), BF16),
    "nemotron-biases": (of("nemotron", attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
                           rope_parameters={"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1.0}),
                        FP32),
    "smollm3": (of("smollm3", num_hidden_layers=4, rope_parameters=YARN), BF16),
    "smollm3-windows": (of("smollm3", num_hidden_layers=3, no_rope_layers=[1, 0, 0], use_sliding_window=True,
                           sliding_window=4, attention_bias=True), FP32),
    "granite": (of("granite", embedding_multiplier=12.0, attention_multiplier=0.3, residual_multiplier=0.22,
                   logits_scaling=8.0), BF16),
    "falcon": (of("falcon", new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=96), BF16),
    "falcon-one-norm": (of("falcon", new_decoder_architecture=True, num_kv_heads=4, num_ln_in_parallel_attn=1,
                           bias=True, tie_word_embeddings=False), FP32),
    "falcon-old": (of("falcon", multi_query=True), BF16),
    "falcon-serial": (of("falcon", multi_query=False, parallel_attn=False, bias=True), FP32),
    "glm": (of("glm", head_dim=16), BF16),
    "glm4": (of("glm4", head_dim=16, attention_bias=False), BF16),
}  # fmt: skip
