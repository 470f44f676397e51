"""Hugging Face's side: random models made from a config, logits of folders, weights of folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

LLAMA = {
    "model_type": "llama",
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 199, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 24}
# The sizes are chosen so that nothing is square that need not be: a transposed or permuted weight shows.
MODELS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "llama": (LLAMA, torch.bfloat16),
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
        torch.float32,
    ),
    "gpt2": (GPT2, torch.float32),
    "gpt2-untied-relu": ({**GPT2, "tie_word_embeddings": False, "activation_function": "relu"}, torch.float16),
}


def make_folder(folder: Path, settings: dict[str, Any], dtype: torch.dtype) -> None:
    """A random model; norms and biases too, so that none can take another's place unseen."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(folder, max_shard_size="60KB")


def logits_of_folder(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """FP32 logits `[b, s, vocab]` that transformers computes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(tokens).logits


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the safetensors files of a folder."""
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            weights.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return weights
