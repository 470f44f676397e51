"""Published models as configs of this project."""

from __future__ import annotations

from typing import Any

from megatron_fp8.config.schema import Config

_GPT = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "vocab_size": 50257,
}
GPT2_SMALL = _GPT | {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024}
GPT3_175B = _GPT | {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "seq_length": 2048}
LLAMA2_7B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "ffn_hidden_size": 11008,
    "seq_length": 4096,
    "vocab_size": 32000,
}
LLAMA3_8B = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "seq_length": 8192,
    "vocab_size": 128256,
}
LLAMA3_70B = LLAMA3_8B | {
    "num_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "ffn_hidden_size": 28672,
}


def config_of(model: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """A config with this model; micro-batches of one sample, 1,024 a step, unless told."""
    base: dict[str, Any] = {
        "run": {"name": "published"},
        "model": model,
        "training": {"micro_batch_size": 1, "global_batch_size": 1024, "train_iters": 1},
        "optimizer": {"lr": 1e-4},
    }
    return Config.model_validate({**base, **sections})
