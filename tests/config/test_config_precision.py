"""What must hold between the keys of the `precision` section, and which of them do nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_samples import VOCAB_SIZE, load_small

from megatron_fp8.config.check import check_config
from megatron_fp8.config.config_warnings import config_warnings
from megatron_fp8.config.fp8_formats import describe_formats, layers_in_bf16, linear_layers_in_fp8, resolved_fp8_format
from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.problem import ConfigError
from megatron_fp8.config.schema_model import PrecisionConfig

FP8, MXFP8 = "mode=fp8", "fp8_recipe=mxfp8"
FIRST_LAST = "first_last_layers_bf16=true"


def load(directory: Path, overrides: list[str]):
    """The small config with other values; keys without a section are of `precision`."""
    return load_small(directory, [text if "." in text.partition("=")[0] else f"precision.{text}" for text in overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        ["mode=fp16"],
        ["mode=fp16", "loss_scale=128", "min_loss_scale=1e30"],
        [FP8, "fp8_recipe=tensorwise", "fp8_format=hybrid"],
        [FP8, "fp8_recipe=blockwise"],
        [FP8, MXFP8, "fp8_format=e4m3"],
        [FP8, "override_linear_precision=[false,true,true]"],
        [FP8, FIRST_LAST, "bf16_layers=[0,1]"],
        [FP8, FIRST_LAST, "num_layers_at_start_in_bf16=0", "num_layers_at_end_in_bf16=3"],
        [FP8, "fp8_param_gather=true"],
        [FP8, "fp8_param_gather=true", "fp8_recipe=tensorwise", "exp_avg_dtype=bf16"],
        [FP8, "main_params_dtype=fp16", "exp_avg_dtype=fp8", "exp_avg_sq_dtype=fp16", "main_grads_dtype=bf16"],
        [FP8, "fp8_fallback=true"],
        # Other recipes have no amaxes to reduce.
        [FP8, "fp8_recipe=tensorwise", "amax_reduction=data_parallel", "parallel.tensor_model_parallel_size=2"],
        # Without FP8 its keys mean nothing.
        ["bf16_layers=[9,9]", "override_linear_precision=[true,true,true]", "fp8_param_gather=true"],
        ["initial_loss_scale=0.5"],
    ],
)
def test_valid_formats_pass(tmp_path: Path, overrides: list[str]) -> None:
    assert check_config(load(tmp_path, overrides), 2, VOCAB_SIZE) == []


@pytest.mark.parametrize(
    ("overrides", "key", "reason", "use"),
    [
        ([FP8, "fp8_recipe=blockwise", "fp8_format=hybrid"], "fp8_format", "E5M2", "fp8_format=e4m3 or precision."),
        ([FP8, MXFP8, "fp8_format=hybrid"], "fp8_format", "small block", "fp8_recipe=tensorwise"),
        ([FP8, "bf16_layers=[1,4,-1]"], "bf16_layers", "numbered 0 to 3", "bf16_layers=[1]"),
        ([FP8, "bf16_layers=[2,1,2]"], "bf16_layers", "duplicate layers", "bf16_layers=[2,1]"),
        ([FP8, "bf16_layers=[0,1,2,3]"], "mode", "all 4 layers", "precision.bf16_layers=[]"),
        ([FP8, "bf16_layers=[1,2]", FIRST_LAST], "mode", "nothing would run", "first_last_layers_bf16=false"),
        (
            [FP8, FIRST_LAST, "num_layers_at_start_in_bf16=3", "num_layers_at_end_in_bf16=2"],
            *("num_layers_at_start_in_bf16", "exceeds model.num_layers=4", "num_layers_at_start_in_bf16=1"),
        ),
        (
            [FP8, "override_linear_precision=[true,true,true]"],
            "override_linear_precision",
            "nothing",
            "[false,false,true]",
        ),
        (
            [
                *(FP8, "override_linear_precision=[true,false,true]"),
                *("model.fuse_qkv_params=false", "parallel.use_distributed_optimizer=false"),
            ],
            *(
                "override_linear_precision",
                "autograd then",
                "[false,false,true]; or model.fuse_qkv_params=true",
            ),
        ),
        (
            [FP8, "fp8_fallback=true", "fp8_health_interval=0"],
            "fp8_fallback",
            "disables",
            "health_interval=100",
        ),
        ([FP8, "fp8_fallback=true", "fp8_param_gather=true"], "fp8_fallback", "only in FP8", "fp8_param_gather=false"),
        (
            [FP8, "fp8_fallback=true", "fp8_fallback_num_healthy_checks=1", "model.fuse_qkv_params=false"],
            *("fp8_fallback_num_healthy_checks", "not measured", "fp8_fallback_num_healthy_checks=0"),
        ),
        (["mode=fp16", "initial_loss_scale=0.5"], "initial_loss_scale", "the lowest scale", "min_loss_scale=0.5"),
        (
            ["exp_avg_dtype=bf16", "parallel.use_distributed_optimizer=false"],
            *(
                "exp_avg_dtype",
                "use_distributed_optimizer",
                "parallel.use_distributed_optimizer=true; or precision.exp",
            ),
        ),
        (["mode=fp16", "main_grads_dtype=bf16"], "main_grads_dtype", "parameters' format", "main_grads_dtype=fp32"),
        (
            ["mode=fp32", "main_params_dtype=fp16"],
            "main_params_dtype",
            "their own",
            "main_params_dtype=fp32",
        ),
        (
            [FP8, "fp8_param_gather=true", "parallel.use_distributed_optimizer=false"],
            *("fp8_param_gather", "gathers them", "parallel.use_distributed_optimizer=true"),
        ),
        ([FP8, "fp8_param_gather=true", MXFP8], "fp8_param_gather", "replace_raw_data", "fp8_recipe=blockwise"),
        (
            [FP8, "fp8_param_gather=true", "override_linear_precision=[false,true,false]"],
            *("fp8_param_gather", "only in FP8", "override_linear_precision=[false,false,false]"),
        ),
        (
            [FP8, "fp8_param_gather=true", "exp_avg_dtype=bf16"],
            "exp_avg_dtype",
            "FP8-rounded weights",
            "exp_avg_dtype=fp32",
        ),
        (
            [FP8, "fp8_param_gather=true", "main_params_dtype=fp16", "fp8_recipe=blockwise"],
            *("main_params_dtype", "FP32 master weights", "fp8_param_gather=false"),
        ),
    ],
)
def test_each_rule_refuses_what_it_is_for(
    tmp_path: Path, overrides: list[str], key: str, reason: str, use: str
) -> None:
    problems = check_config(load(tmp_path, overrides), 2, VOCAB_SIZE)
    assert [problem.key for problem in problems] == [f"precision.{key}"]
    assert reason in problems[0].reason
    assert use in problems[0].use_instead


@pytest.mark.parametrize("key", ["loss_scale", "initial_loss_scale", "min_loss_scale"])
@pytest.mark.parametrize("scale", ["1e39", "1e300", "1e-50"])
def test_loss_scales_that_fp32_cannot_hold_are_refused(tmp_path: Path, key: str, scale: str) -> None:
    with pytest.raises(ConfigError, match=rf"precision\.{key} = {scale}"):
        load(tmp_path, ["mode=fp16", f"{key}={scale}"])


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ([FP8, "fp8_recipe=tensorwise", "fp8_margin=1", "amax_reduction=off"], ["fp8_margin", "amax_reduction"]),
        ([FP8, MXFP8, "fp8_interval=2", "fp8_amax_history_len=8"], ["fp8_interval", "fp8_amax_history_len"]),
        ([FP8, "fp8_margin=1", "amax_reduction=off", "fp8_interval=2"], []),
        ([FP8, "num_layers_at_end_in_bf16=2"], ["num_layers_at_end_in_bf16"]),
        ([FP8, "fp8_fallback_max_error=0.5"], ["fp8_fallback_max_error"]),
        ([FP8, "fp8_fallback_max_error=0.5", "fp8_fallback=true"], []),
        ([FP8, "loss_scale=8"], ["loss_scale"]),
        (["mode=fp16", "loss_scale=8", "hysteresis=3"], ["hysteresis"]),
        (["mode=fp16", "hysteresis=3"], []),
        (["mode=fp16", "bf16_layers=[1]"], ["bf16_layers"]),
        # Formats of the optimizer count in every mode.
        (["exp_avg_dtype=bf16"], []),
    ],
)
def test_keys_that_do_nothing_are_pointed_out(tmp_path: Path, overrides: list[str], keys: list[str]) -> None:
    warnings = config_warnings(load(tmp_path, overrides), None)
    assert [warning.key for warning in warnings] == [f"precision.{key}" for key in keys]
    assert all("no effect" in warning.reason for warning in warnings)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["model.seq_length=128"], []),
        (["model.seq_length=64"], ["model.seq_length"]),
        (["model.seq_length=128", "model.hidden_size=192"], ["model.hidden_size"]),
        (["model.seq_length=64", "precision.fp8_recipe=tensorwise"], []),
    ],
)
def test_gathers_that_te_makes_in_bf16_are_pointed_out(tmp_path: Path, overrides: list[str], keys: list[str]) -> None:
    parallel = ["parallel.sequence_parallel=true", "parallel.tensor_model_parallel_size=2"]
    loaded = load(tmp_path, [FP8, "fp8_recipe=blockwise", *parallel, *overrides])
    warnings = config_warnings(loaded, derive_layout(loaded.config, 2, VOCAB_SIZE))
    assert [warning.key for warning in warnings if "gathered in BF16" in warning.reason] == keys


def test_layers_are_counted_over_the_whole_model() -> None:
    config = PrecisionConfig(first_last_layers_bf16=True, num_layers_at_end_in_bf16=2, bf16_layers=[3])
    assert layers_in_bf16(config, 8) == {0, 3, 6, 7}
    assert layers_in_bf16(PrecisionConfig(first_last_layers_bf16=True, num_layers_at_end_in_bf16=5), 2) == {0, 1}
    assert layers_in_bf16(PrecisionConfig(bf16_layers=[1]), 8) == {1}


def test_the_format_that_a_recipe_has_by_default() -> None:
    found = {recipe: resolved_fp8_format(PrecisionConfig(fp8_recipe=recipe)) for recipe in ("delayed", "blockwise")}
    assert found == {"delayed": "hybrid", "blockwise": "e4m3"}
    assert resolved_fp8_format(PrecisionConfig(fp8_format="e4m3")) == "e4m3"


@pytest.mark.parametrize(
    ("values", "arithmetic", "text"),
    [
        (
            {"mode": "fp8", "first_last_layers_bf16": True},
            "emulated",
            "fp8 delayed hybrid, history 1024, emulated; 24 of 32 linear layers in fp8; "
            "masters fp32, gradients fp32, moments fp32",
        ),
        (
            {"mode": "fp8", "fp8_recipe": "mxfp8", "override_linear_precision": [False, True, True]},
            "",
            "fp8 mxfp8 e4m3; 32 of 32 linear layers in fp8, their dgrad and wgrad in bf16; "
            "masters fp32, gradients fp32, moments fp32",
        ),
        (
            {"mode": "bf16", "bf16_layers": [1], "exp_avg_sq_dtype": "fp8"},
            "native",
            "bf16, native; 0 of 32 linear layers in fp8; masters fp32, gradients fp32, moments fp32 and fp8",
        ),
        (
            {"mode": "fp32"},
            "",
            "fp32; 0 of 32 linear layers in fp8; masters the fp32 parameters, gradients fp32, moments fp32",
        ),
        (
            {"mode": "fp16", "loss_scale": 128.0},
            "",
            "fp16, loss scale 128; 0 of 32 linear layers in fp8; masters fp32, gradients fp32, moments fp32",
        ),
    ],
)
def test_the_line_that_says_what_runs(values: dict[str, Any], arithmetic: str, text: str) -> None:
    assert describe_formats(PrecisionConfig(**values), 8, arithmetic) == text


def test_linear_layers_are_counted() -> None:
    assert linear_layers_in_fp8(PrecisionConfig(mode="fp8", bf16_layers=[0, 5]), 16) == (56, 64)
    assert linear_layers_in_fp8(PrecisionConfig(mode="bf16"), 16) == (0, 64)
