"""Hugging Face's side: random models made from a config, logits of folders, weights of folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.hf.their_configs import GPT2 as GPT2
from tests.hf.their_configs import LLAMA as LLAMA
from tests.hf.their_configs import MODELS as MODELS


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
