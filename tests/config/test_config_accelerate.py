"""Accelerate's YAML as defaults of the precision section: every key honoured, or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_samples import load_small, write

from megatron_fp8.config.config_warnings import config_warnings
from megatron_fp8.config.load import LoadedConfig, dump_config, load_config
from megatron_fp8.config.problem import ConfigError

# As `accelerate config` writes it, its launch keys included.
WRITTEN_BY_ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
fp8_config:
  amax_compute_algorithm: max
  amax_history_length: 16
  backend: TE
  fp8_format: E4M3
  interval: 4
  margin: 2
  override_linear_precision:
  - false
  - false
  - true
  use_autocast_during_eval: true
machine_rank: 0
main_training_function: main
mixed_precision: fp8
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
use_cpu: false
"""


def load(directory: Path, accelerate: str, *overrides: str) -> LoadedConfig:
    path = write(directory, accelerate, "accelerate.yaml")
    return load_small(directory, [f"precision.from_accelerate={path}", *overrides])


def precision(loaded: LoadedConfig, *names: str) -> list[Any]:
    return [getattr(loaded.config.precision, name) for name in names]


def test_every_key_is_honoured_with_its_line(tmp_path: Path) -> None:
    loaded = load(tmp_path, WRITTEN_BY_ACCELERATE)
    names = ["mode", "fp8_recipe", "fp8_format", "fp8_margin", "fp8_interval", "fp8_amax_history_len"]
    assert precision(loaded, *names) == ["fp8", "delayed", "e4m3", 2, 4, 16]
    names = ["fp8_amax_compute_algo", "override_linear_precision", "fp8_eval"]
    assert precision(loaded, *names) == ["max", [False, False, True], True]
    assert loaded.origins["precision.fp8_margin"] == f"{tmp_path / 'accelerate.yaml'}:12"
    assert loaded.origins["precision.mode"] == f"{tmp_path / 'accelerate.yaml'}:20"


def test_what_is_left_out_is_what_accelerate_does(tmp_path: Path) -> None:
    loaded = load(tmp_path, "mixed_precision: fp8\nfp8_config: {backend: TE}\n")
    names = ["fp8_margin", "fp8_interval", "fp8_format", "fp8_amax_history_len"]
    assert precision(loaded, *names) == [0, 1, "hybrid", 1024]
    assert precision(loaded, "fp8_amax_compute_algo", "fp8_eval") == ["most_recent", False]
    assert "Accelerate's default" in loaded.origins["precision.fp8_amax_compute_algo"]
    assert precision(load_small(tmp_path), "fp8_amax_compute_algo", "fp8_eval") == ["max", True]


def test_our_own_keys_win(tmp_path: Path) -> None:
    loaded = load(tmp_path, WRITTEN_BY_ACCELERATE, "precision.fp8_margin=1", "precision.fp8_format=hybrid")
    assert precision(loaded, "fp8_margin", "fp8_format", "fp8_interval") == [1, "hybrid", 4]
    assert loaded.origins["precision.fp8_margin"] == "command line"
    assert precision(load(tmp_path, WRITTEN_BY_ACCELERATE, "precision.mode=bf16"), "mode") == ["bf16"]


def test_a_file_below_ours_in_the_chain_of_bases(tmp_path: Path) -> None:
    accelerate = write(tmp_path, WRITTEN_BY_ACCELERATE, "accelerate.yaml")
    base = load_small(tmp_path).config
    write(tmp_path, dump_config(base).replace("fp8_margin: 0", "fp8_margin: 7"), "base.yaml")
    text = f"base: base.yaml\nprecision:\n  from_accelerate: {accelerate}\n"
    assert precision(load_config(write(tmp_path, text, "top.yaml")), "fp8_margin") == [7]


@pytest.mark.parametrize(
    ("text", "mode"), [("no", "fp32"), ("'no'", "fp32"), ("bf16", "bf16"), ("FP16", "fp16"), ("null", "fp32")]
)
def test_other_modes(tmp_path: Path, text: str, mode: str) -> None:
    loaded = load(tmp_path, f"mixed_precision: {text}\n")
    assert precision(loaded, "mode", "fp8_amax_compute_algo", "fp8_eval") == [mode, "max", True]
    assert config_warnings(loaded, None) == []


@pytest.mark.parametrize("prefix", ["", "fp8_"])
def test_mxfp8(tmp_path: Path, prefix: str) -> None:
    loaded = load(tmp_path, f"mixed_precision: fp8\nfp8_config: {{{prefix}use_mxfp8_block_scaling: true}}\n")
    assert precision(loaded, "fp8_recipe", "fp8_format", "fp8_eval") == ["mxfp8", None, False]
    assert config_warnings(loaded, None) == []


@pytest.mark.parametrize(
    ("text", "key", "use"),
    [
        ("fp8_config: {backend: AO}", "fp8_config.backend", "TE"),
        ("fp8_config: {backend: MSAMP}", "fp8_config.backend", "TE"),
        ("fp8_config: {pad_inner_dim: true}", "fp8_config.pad_inner_dim", "--check"),
        ("fp8_config: {optimization_level: O2}", "fp8_config.optimization_level", "precision.exp_avg_dtype"),
        ("fp8_config: {fp8_format: E5M2}", "fp8_config.fp8_format", "HYBRID"),
        ("fp8_config: {amax_history: 4}", "fp8_config.amax_history", "amax_history_len"),
        ("fp8_config: {marginn: 4}", "fp8_config.marginn", "margin"),
        ("fp8_config: {amax_history_len: 4, amax_history_length: 5}", "fp8_config.amax_history_length", "one of"),
        ("fp8_config: {use_mxfp8_block_scaling: 7}", "fp8_config.use_mxfp8_block_scaling", "true or false"),
        ("fp8_config: {margin: 2.5}", "precision.fp8_margin", "an integer"),
        ("fp8_config: {override_linear_precision: [true]}", "precision.override_linear_precision", "of length 3"),
        ("fp8_config: TE", "fp8_config", "fp8_format: HYBRID"),
        ("fp8_config: [TE]", "fp8_config", "fp8_format: HYBRID"),
        ("mixed_precision: fp4", "mixed_precision", "no or fp16 or bf16 or fp8"),
        ("mixed_precison: fp8", "mixed_precison", "mixed_precision"),
        ("fsdp_config: {fsdp_version: 2}", "fsdp_config.fsdp_version", "use_distributed_optimizer"),
        ("downcast_bf16: 'yes'", "downcast_bf16", "precision.mode"),
    ],
)
def test_what_is_not_honoured_is_named(tmp_path: Path, text: str, key: str, use: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, f"{text}\nnum_processes: 8\n")
    (problem,) = caught.value.problems
    assert problem.key == key
    assert use in problem.use_instead
    assert problem.origin == f"{tmp_path / 'accelerate.yaml'}:1"


def test_all_mistakes_are_named_at_once_with_ours(tmp_path: Path) -> None:
    text = "mixed_precision: fp8\nfp8_config:\n  backend: AO\n  marginn: 1\n  interval: x\n"
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, "optimizer.lr=fast")
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {"fp8_config.backend", "fp8_config.marginn", "precision.fp8_interval", "optimizer.lr"}


@pytest.mark.parametrize("text", [None, "[", "- a"])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "accelerate.yaml"
    if text is not None:
        write(tmp_path, text, path.name)
    with pytest.raises(ConfigError) as caught:
        load_small(tmp_path, [f"precision.from_accelerate={path}"])
    assert "accelerate.yaml" in str(caught.value)


def test_a_written_config_needs_the_file_no_more(tmp_path: Path) -> None:
    loaded = load(tmp_path, WRITTEN_BY_ACCELERATE)
    (tmp_path / "accelerate.yaml").unlink()
    text = dump_config(loaded.config, loaded.origins)
    assert "accelerate.yaml was read" in text
    assert load_config(write(tmp_path, text, "dumped.yaml")).config == loaded.config


def test_what_the_config_overrides_of_the_file_is_said(tmp_path: Path) -> None:
    base = WRITTEN_BY_ACCELERATE.replace("amax_history_length: 16", "amax_history_length: 32")
    loaded = load(tmp_path, base, "precision.fp8_amax_history_len=16", "precision.fp8_margin=2")
    (warning,) = config_warnings(loaded, None)
    assert (warning.key, warning.value) == ("precision.fp8_amax_history_len", 16)
    assert f"overrides 32 of the Accelerate file ({tmp_path / 'accelerate.yaml'}:8)" in warning.reason
    # What the file does not say is not overridden.
    silent = load(tmp_path, "mixed_precision: fp8\nfp8_config: {backend: TE}\n", "precision.fp8_amax_history_len=16")
    assert config_warnings(silent, None) == []
