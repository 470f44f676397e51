"""Owns the choice between the forms that models are converted to and from. Imports no torch."""

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
from megatron_fp8.hf.groups import TensorGroup
from megatron_fp8.hf.settings import HFSettings

_BY_MODEL_TYPE = {llama.MODEL_TYPE: llama, gpt2.MODEL_TYPE: gpt2}
_BY_POSITIONS = {"rope": llama, "learned_absolute": gpt2}


def config_json(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Hugging Face's `config.json` of a model: Llama's with RoPE, GPT-2's with learned positions.

    Raises ConfigError with every key that it cannot express.
    """
    return _BY_POSITIONS[model.position_embedding_type].config_json(model, vocab_size)


def tensor_groups(model: ModelConfig, vocab_size: int) -> Iterator[TensorGroup]:
    """Every tensor of a model, ours beside theirs."""
    return _BY_POSITIONS[model.position_embedding_type].tensor_groups(model, vocab_size)


def read_model(path: Path, seq_length: int | None) -> ModelConfig:
    """Our `model` section for a `config.json`; samples have `seq_length` tokens, or as many as it has positions.

    Raises ConfigError with every value that this project cannot express.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInputError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadInputError(f"{path} holds no settings")
    settings = HFSettings(values, str(path))
    family = _BY_MODEL_TYPE.get(str(values.get("model_type")))
    if family is None:
        reason = "only models of these types are converted"
        settings.reject("model_type", values.get("model_type"), reason, f"one of {', '.join(_BY_MODEL_TYPE)}")
        settings.finish()
    assert family is not None
    settings.only("quantization_config", None, None, "quantized weights are not converted")
    ours = family.model_values(settings)
    settings.finish()
    ours["seq_length"] = seq_length or ours["max_position_embeddings"]
    if family is gpt2 and ours["seq_length"] > ours["max_position_embeddings"]:
        reason = f"the model has {ours['max_position_embeddings']} positions"
        raise ConfigError.from_problems([Problem("--seq-length", seq_length, reason, "at most that many")])
    try:
        return ModelConfig.model_validate(ours)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise BadInputError(f"{path} gives no model: {wrong}") from error
