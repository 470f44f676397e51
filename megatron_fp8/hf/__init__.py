"""Converts models between checkpoints of this project and Hugging Face folders. Imports no torch.

A family (`hf/families`) says which keys its `config.json` has and how its tensors are called.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from megatron_fp8.config.problem import ConfigError, Problem
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf.families import FAMILIES
from megatron_fp8.hf.family import Family
from megatron_fp8.hf.mapping import HFSettings


def family_for(model: ModelConfig) -> Family:
    """The family that the model came from, if it still can hold it, or the first that can.

    Raises ConfigError with what the one it came from, or the one that comes nearest, cannot express.
    """
    preferred = [name for name in FAMILIES if name == model.hf_model_type]
    found: dict[str, list[Problem]] = {}
    for name in [*preferred, *(name for name in FAMILIES if name not in preferred)]:
        found[name] = list(FAMILIES[name].problems(model))
        if not found[name]:
            return FAMILIES[name]
    nearest = preferred[0] if preferred else min(found, key=lambda name: len(found[name]))
    raise ConfigError.from_problems(found[nearest])


def read_model(path: Path, seq_length: int | None, notes: list[str] | None = None) -> ModelConfig:
    """Our `model` section for a `config.json`; `seq_length`: tokens per sample (None: all positions).

    What training would do otherwise is added to `notes`. Raises ConfigError with every value that is not supported.
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
    family = FAMILIES.get(str(values.get("model_type")))
    if family is None:
        reason = "this type of model is not supported"
        settings.reject("model_type", values.get("model_type"), reason, f"one of {', '.join(FAMILIES)}")
        settings.finish()
    assert family is not None
    ours = family.values(settings)
    settings.finish()
    if notes is not None:
        notes += settings.notes
    ours["seq_length"] = seq_length or ours["max_position_embeddings"]
    if ours["position_embedding_type"] != "rope" and ours["seq_length"] > ours["max_position_embeddings"]:
        reason = f"the model has {ours['max_position_embeddings']} positions"
        raise ConfigError.from_problems([Problem("--seq-length", seq_length, reason, "no more than its positions")])
    try:
        return ModelConfig.model_validate(ours)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise BadInputError(f"{path} does not describe a valid model: {wrong}") from error
