"""Every key of every class's `config.json` is used, known to change nothing, or refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from megatron_fp8.config.problem import ConfigError
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf import read_model
from megatron_fp8.hf.families import FAMILIES
from megatron_fp8.hf.family import HARMLESS
from tests.hf.their_configs import of

# Keys that older files have, which the classes take without declaring them.
OLDER = ("rope_theta", "rope_scaling", "partial_rotary_factor", "head_dim", "quantization_config", "rotary_pct",
         "rotary_emb_base", "rope_local_base_freq", "original_max_position_embeddings", "sliding_window",
         "layer_types", "is_decoder", "add_cross_attention", "made_up")  # fmt: skip
# What counts only where the file has no list of layers, or where something else is on or off.
UNUSED_HERE = {
    "qwen2": {"max_window_layers", "sliding_window", "use_sliding_window"},
    "qwen3": {"max_window_layers", "sliding_window", "use_sliding_window"},
    "smollm3": {"no_rope_layer_interval", "sliding_window", "use_sliding_window"},
    "phi3": {"original_max_position_embeddings"},
    "falcon": {"multi_query", "parallel_attn"},
}


def declared(model_type: str) -> dict[str, Any]:
    """The `config.json` that the class writes for a small model, with every key that it declares."""
    settings = {"head_dim": 16} if model_type.startswith(("gemma", "glm", "qwen3")) else {}
    settings |= {"new_decoder_architecture": True, "num_kv_heads": 2} if model_type == "falcon" else {}
    config = (
        AutoConfig.for_model(**of(model_type, **settings)) if model_type != "gpt2" else AutoConfig.for_model("gpt2")
    )
    written = {field.name: getattr(config, field.name, None) for field in dataclasses.fields(config)}
    return {**written, **config.to_dict()}


def others(value: Any) -> list[Any]:
    """Values of the same kind that are not this one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value * 2 + 2, value + 1]
    if isinstance(value, float):
        return [value / 2 + 0.125]
    if isinstance(value, str):
        return ["relu" if value != "relu" else "silu", "something"]
    if isinstance(value, list):
        return [value[1:] if value and isinstance(value[0], str) else [0, 1], ["full_attention"] * len(value)]
    if isinstance(value, dict):
        return [{**value, "rope_type": "linear", "factor": 2.0}, {"something": 1}]
    return [7, 0.5, True, "something", [1], {"rope_type": "linear", "factor": 2.0}]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_is_used_or_harmless_or_refused(tmp_path: Path, model_type: str) -> None:
    family, path = FAMILIES[model_type], tmp_path / "config.json"
    plain = json.loads(json.dumps(declared(model_type), default=str))

    def read(values: dict[str, Any]) -> Any:
        path.write_text(json.dumps(values))
        notes: list[str] = []
        return read_model(path, 8, notes), notes

    model = read(plain)
    ignored = []
    for key in [*plain, *(key for key in OLDER if key not in plain)]:
        outcomes = set()
        for value in others(plain.get(key)):
            try:
                outcomes.add("ignored" if read({**plain, key: value}) == model else "used")
            except (ConfigError, BadInputError) as error:
                named = str(error).startswith(str(path)) or f"{key.split('.')[0]}" in str(error)
                outcomes.add("refused" if named else f"refused as {error}")
        assert outcomes <= {"used", "ignored", "refused"}, (key, outcomes)
        if outcomes == {"ignored"}:
            ignored.append(key)
    unknown = set(ignored) - HARMLESS - family.harmless - UNUSED_HERE.get(model_type, set())
    # What `rope_parameters` already says is not asked for a second time, as in transformers.
    unknown -= {"rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base", "rope_local_base_freq"}
    assert not unknown, unknown


def test_harmless_keys_are_no_part_of_any_family() -> None:
    for family in FAMILIES.values():
        model = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 8}
        written = family.config_json(ModelConfig.model_validate(model), 10)
        ids = {"bos_token_id", "eos_token_id", "pad_token_id", "architectures", "model_type"}
        assert not (written.keys() - ids) & (HARMLESS | family.harmless)
