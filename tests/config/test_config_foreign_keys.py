"""Names that other programs have lead to what is meant here, or to nothing; spelling leads to near misses only."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from transformers import GPT2Config, LlamaConfig, TrainingArguments

from megatron_fp8.config.fields import config_fields
from megatron_fp8.config.foreign_keys import FOREIGN_KEYS
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.config.schema import Config
from tests.config.config_samples import write
from tests.small_run import load_config

KEY = re.compile(r"\b(?:" + "|".join(Config.model_fields) + r")\.[a-z0-9_]+")
NOTHING = "--help lists the keys"


def hint(tmp_path: Path, key: str) -> str:
    """What is said to be used instead of an unknown key."""
    section, _, name = key.rpartition(".")
    path = write(tmp_path, f"{section}: {{{name}: 1}}\n", "foreign.yaml")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return next(problem.use_instead for problem in caught.value.problems if problem.key == key)


def test_every_hint_names_real_keys_or_says_that_there_are_none() -> None:
    known = config_fields()
    for name, use in FOREIGN_KEYS.items():
        keys = KEY.findall(use)
        assert keys or use.startswith("no such key: ") or use.startswith("run.root"), name
        assert set(keys) <= known.keys(), name
        assert name not in {spec.name for spec in known.values()}, f"{name} is a key of its own"


@pytest.mark.parametrize(
    ("key", "use"),
    [
        ("model.num_key_value_heads", "model.num_query_groups"),
        ("optimizer.max_lr", "optimizer.lr"),
        ("training.steps", "training.train_iters"),
        ("training.local_batch_size", "training.micro_batch_size"),
        ("training.eval_steps", "training.eval_interval"),
        ("training.gradient_accumulation_steps", "no such key: it follows from training.global_batch_size"),
        ("model.hidden_act", "model.activation: silu is swiglu"),
        ("model.tie_word_embeddings", "model.untie_embeddings_and_output_weights, with the opposite value"),
        ("model.num_experts", "no such key: every model here is dense"),
        ("model.hiden_size", "model.hidden_size"),
        ("model.num_layer", "model.num_layers"),
        ("model.numlayers", "model.num_layers"),
        ("training.train_itesr", "training.train_iters"),
        ("model.lr", "optimizer.lr"),
        # Alike, and something else.
        ("training.min_iters", NOTHING),
        ("optimizer.adam_beta3", NOTHING),
        ("model.hidden", NOTHING),
        ("training.eval_tokens", NOTHING),
        ("training.local_seed", NOTHING),
    ],
)
def test_what_is_meant_is_said(tmp_path: Path, key: str, use: str) -> None:
    assert hint(tmp_path, key).startswith(use)


def test_dashes_and_nested_sections_are_seen_through(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "a: {}\n", "any.yaml"), ["--num-layers=3", "optimizer.lr_scheduler.warmup_steps=1"])
    uses = {problem.key: problem.use_instead for problem in caught.value.problems}
    assert any("optimizer.lr_warmup_iters" in use for use in uses.values()), uses


def names_of(classes: tuple[type, ...]) -> list[str]:
    return sorted({field.name for each in classes for field in dataclasses.fields(each)})


@pytest.mark.parametrize(
    "names",
    [
        names_of((TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)),
        names_of((TrainingArguments,)),
        sorted({*LlamaConfig().to_dict(), *GPT2Config().to_dict()}),
    ],
    ids=["megatron", "trainer", "models"],
)
def test_no_name_of_another_program_is_led_astray_by_its_spelling(tmp_path: Path, names: list[str]) -> None:
    """Each is a key here, in the table, or gets no hint: none is only spelled like something else."""
    ours = {spec.name for spec in config_fields().values()}
    text = "\n".join(f"  {name}: 1" for name in names if name not in ours)
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, f"training:\n{text}\n", "all.yaml"))
    hints = {problem.key.removeprefix("training."): problem.use_instead for problem in caught.value.problems}
    led = {name: hints[name] for name in names if name in hints and name not in FOREIGN_KEYS and hints[name] != NOTHING}
    assert led == {}
