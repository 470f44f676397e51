"""Converts models between checkpoints of this project and Hugging Face folders. Imports no torch.

Two forms are known: `llama` (RMSNorm, gated MLP, RoPE, grouped queries) and `gpt2` (LayerNorm, learned positions).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_fp8.config.problem import ConfigError, Problem
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf import gpt2, llama
from megatron_fp8.hf.mapping import HFSettings, TensorGroup

_BY_MODEL_TYPE = {llama.MODEL_TYPE: llama, gpt2.MODEL_TYPE: gpt2}


def config_json(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Hugging Face's `config.json` of a model: Llama's with RoPE, GPT-2's with learned positions.

    Raises ConfigError with every key that it cannot express.
    """
    if model.position_embedding_type == "rope":
        return llama.config_json(model, vocab_size)
    return gpt2.config_json(model, vocab_size)


def tensor_groups(model: ModelConfig, vocab_size: int) -> Iterator[TensorGroup]:
    """Every tensor of a model, ours beside theirs."""
    form = llama if model.position_embedding_type == "rope" else gpt2
    groups: Iterator[TensorGroup] = form.tensor_groups(model, vocab_size)
    return groups


def read_model(path: Path, seq_length: int | None) -> ModelConfig:
    """Our `model` section for a `config.json`; `seq_length`: tokens per sample (None: all positions).

    Raises ConfigError with every value that is not supported.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInputError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadInputError(f"{path} is not a JSON object")
    settings = HFSettings(values, str(path))
    family = _BY_MODEL_TYPE.get(str(values.get("model_type")))
    if family is None:
        reason = "this type of model is not supported"
        settings.reject("model_type", values.get("model_type"), reason, f"one of {', '.join(_BY_MODEL_TYPE)}")
        settings.finish()
    assert family is not None
    settings.only("quantization_config", None, None, "quantized weights are not supported")
    ours = family.model_values(settings)
    settings.finish()
    ours["seq_length"] = seq_length or ours["max_position_embeddings"]
    if family is gpt2 and ours["seq_length"] > ours["max_position_embeddings"]:
        reason = f"the model has {ours['max_position_embeddings']} positions"
        raise ConfigError.from_problems([Problem("--seq-length", seq_length, reason, "no more than its positions")])
    try:
        return ModelConfig.model_validate(ours)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise BadInputError(f"{path} does not describe a valid model: {wrong}") from error
