"""Any model here either has a class of transformers that is the same model, or is refused; drawn at random."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from transformers import AutoConfig

from megatron_fp8.config.facts import Facts
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.config.rules_model import check_model
from megatron_fp8.config.rules_model_form import check_model_form
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.hf import family_for, read_model
from megatron_fp8.hf.families import FAMILIES
from megatron_fp8.hf.import_model import ImportSettings, import_folder
from megatron_fp8.hf.same_model import differing_keys
from tests.hf.our_models import logits_of
from tests.hf.their_models import logits_of_folder, make_folder
from tests.ranks import run_on_ranks
from tests.small_run import small_config

VOCAB_SIZE, SEQ_LENGTH, NUM_LAYERS = 131, 12, 3
# What each family's class has built in or can say, so that draws are often models that it can hold.
FORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"window_size": [3, 0]},
    "qwen2": {"add_qkv_bias": True, "window_size": [3, 0], "window_attn_skip_freq": [0, 1, 1]},
    "qwen3": {"qk_layernorm": "per_head", "kv_channels": 16},
    "gemma": {"layernorm_zero_centered_gamma": True, "activation": "geglu", "embedding_multiplier": 48**0.5},
    "gemma2": {
        "layernorm_zero_centered_gamma": True,
        "activation": "geglu",
        "embedding_multiplier": 48**0.5,
        "norm_placement": "pre_and_post",
        "attn_logit_softcapping": 5.0,
    },
    "olmo": {"normalization": "LayerNorm", "norm_affine": False},
    "olmo2": {"norm_placement": "post", "qk_layernorm": "all_heads"},
    "smollm3": {"no_rope_freq": [2]},
    "granite": {"residual_multiplier": 0.5, "logits_scaling": 4.0},
    "nemotron": {"normalization": "LayerNorm", "layernorm_zero_centered_gamma": True, "activation": "srelu"},
    "gpt_neox": {
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "parallel_attention_mlp": "separate_norms",
        "activation": "exact_gelu",
        "num_query_groups": 4,
    },
    "falcon": {"normalization": "LayerNorm", "parallel_attention_mlp": "shared_norm", "activation": "exact_gelu"},
    "phi": {
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "add_output_bias": True,
        "parallel_attention_mlp": "shared_norm",
        "activation": "gelu",
    },
    "glm4": {"add_qkv_bias": True, "rotary_interleaved": True, "norm_placement": "pre_and_post"},
}
# Changed one at a time or together, whatever the family.
CHANGES: dict[str, list[Any]] = {
    "num_query_groups": [1, 2, 4],
    "kv_channels": [None, 8, 16],
    "activation": ["swiglu", "geglu", "exact_geglu", "gelu", "exact_gelu", "relu", "srelu"],
    "norm_epsilon": [1e-5, 1e-6],
    "rotary_base": [500.0, 1e6],
    "rotary_percent": [1.0, 0.5],
    "rope_scaling_type": ["none", "linear", "dynamic", "llama3", "yarn"],
    "rope_attention_factor": [None, 1.5],
    "add_bias_linear": [True, False],
    "add_mlp_bias": [None, True],
    "untie_embeddings_and_output_weights": [True, False],
    "window_size": [None, [4, 0]],
    "softmax_scale": [None, 0.3],
    "final_logit_softcapping": [None, 2.0],
    "qk_layernorm": ["none", "per_head"],
}
BASE = {
    "num_layers": NUM_LAYERS,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 40,
    "seq_length": SEQ_LENGTH,
    "max_position_embeddings": SEQ_LENGTH,
    "original_max_position_embeddings": 6,
    "rope_scaling_factor": 2.0,
    "vocab_size": VOCAB_SIZE,
}


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """A model that the rules accept: a family's form with up to three changes."""
    form = FORMS[draw(st.sampled_from(list(FORMS)))]
    changed = draw(st.lists(st.sampled_from(list(CHANGES)), max_size=3, unique=True))
    values = {**BASE, **form, **{key: draw(st.sampled_from(CHANGES[key])) for key in changed}}
    model = small_config(model=values).model
    facts = Facts(small_config(model=values), None, None)
    wrong = [*check_model(facts), *check_model_form(facts)]
    return model if not wrong else ModelConfig.model_validate({**BASE, **form})


@settings(max_examples=150, deadline=None, derandomize=True)
@given(models())
def test_the_class_of_transformers_says_the_same(model: ModelConfig) -> None:
    """It accepts what is written for it, and what it writes itself is read as the same model."""
    try:
        family = family_for(model)
    except ConfigError:
        return
    config = AutoConfig.for_model(**{**family.config_json(model, VOCAB_SIZE)})
    assert type(config).__name__.removesuffix("Config") in family.architecture.replace("LMHead", "")
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        again = read_model(Path(folder) / "config.json", SEQ_LENGTH)
    assert list(differing_keys(model, again)) == []
    assert again.vocab_size == VOCAB_SIZE


def test_most_draws_have_a_class_and_every_family_is_drawn() -> None:
    taken = {family_for(ModelConfig.model_validate({**BASE, **form})).model_type for form in FORMS.values()}
    assert taken >= set(FORMS) - {"gemma", "smollm3"}
    assert taken <= set(FAMILIES)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(models())
def test_logits_of_any_model_are_those_of_transformers(model: ModelConfig) -> None:
    try:
        family = family_for(model)
    except ConfigError:
        return
    tokens = torch.randint(0, VOCAB_SIZE, (2, SEQ_LENGTH), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = Path(folder) / "theirs", Path(folder) / "ours"
        make_folder(theirs, family.config_json(model, VOCAB_SIZE), torch.float32)
        import_folder(theirs, ours, ImportSettings(SEQ_LENGTH, None, False), lambda *_: None)
        ((found,),) = run_on_ranks(1, logits_of, [ours / "checkpoints"], [tokens])
        torch.testing.assert_close(found, logits_of_folder(theirs, tokens), atol=1e-4, rtol=0)
