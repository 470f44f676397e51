"""configs/models: each is the model of its public config.json, has its published parameters, and serves as a base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.config.layout import count_parameters
from megatron_fp8.config.load import load_config
from megatron_fp8.hf import read_model
from tests.config.config_samples import write

PRESETS = Path(__file__).parents[2] / "configs" / "models"
# What the hub's files say, keys that say nothing about the model left out, and the parameters that the hub counts.
PUBLIC: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("public_configs.json").read_text())
REST = "training: {micro_batch_size: 1, global_batch_size: 8, train_iters: 1}\noptimizer: {lr: 1e-3}\nrun: {name: x}\n"


def test_every_preset_has_its_public_config() -> None:
    assert {path.stem for path in PRESETS.glob("*.yaml")} == set(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_preset_is_the_public_model(tmp_path: Path, name: str) -> None:
    model = load_config(write(tmp_path, f"base: {PRESETS / name}.yaml\n{REST}")).config.model
    (tmp_path / "config.json").write_text(json.dumps(PUBLIC[name]["config"]))
    assert read_model(tmp_path / "config.json", model.seq_length) == model
    assert model.vocab_size is not None
    published = PUBLIC[name]["parameters"]
    rel = 0 if isinstance(published, int) else 1e-3
    assert count_parameters(model, model.vocab_size) == pytest.approx(published, rel=rel, abs=0)
    assert PUBLIC[name]["source"] in (PRESETS / f"{name}.yaml").read_text().splitlines()[0]
