"""Owns which keys do nothing under a config. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.fields import config_fields
from megatron_fp8.config.schema import Config

# (keys, why they do nothing, what would make them count)
Idle = tuple[list[str], str, str]

_DELAYED = ("fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo", "amax_reduction")
_LOSS_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_BF16_LAYERS = ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "bf16_layers")


def idle_keys(config: Config) -> Iterator[Idle]:
    """Every group of keys without effect."""
    yield from _precision(config)
    yield from _optimizer(config)
    yield from _model(config)
    yield from _checkpoint(config)
    if config.training.eval_iters == 0:
        keys = ["data.valid_data_path", "training.multiple_validation_sets", "training.full_validation"]
        yield keys, "training.eval_iters is 0", "training.eval_iters above 0"
    elif config.training.full_validation:
        yield ["training.eval_iters"], "training.full_validation is true", "training.full_validation=false"
    yield from _logging(config)
    yield from _faults(config)
    if config.profile.start is None and config.profile.stop is None:
        keys = [f"profile.{name}" for name in ("ranks", "record_shapes", "profile_memory", "with_stack")]
        yield keys, "profile.start is null", "profile.start and profile.stop"
    if not config.data.data_path:
        yield ["data.split"], "data.data_path is empty", "data.data_path, or leave the key out"


def _faults(config: Config) -> Iterator[Idle]:
    faults = config.faults
    if faults.nonfinite != "skip":
        keys = ["faults.nonfinite_max_skips_in_a_row", "faults.nonfinite_max_skips"]
        yield keys, f"faults.nonfinite is {faults.nonfinite}", "faults.nonfinite=skip"
    if faults.spike == "off":
        keys = [key for key in config_fields() if key.startswith("faults.spike_")]
        yield keys, "faults.spike is off", "faults.spike=warn or faults.spike=rewind"
    if "rewind" not in (faults.nonfinite, faults.spike):
        yield ["faults.max_rewinds"], "no policy is rewind", "faults.nonfinite=rewind or faults.spike=rewind"


def _logging(config: Config) -> Iterator[Idle]:
    others = [
        key
        for key in config_fields()
        if key.startswith("logging.wandb_") and key not in ("logging.wandb_project", "logging.wandb_mode")
    ]
    if config.logging.wandb_project is None:
        yield [*others, "logging.wandb_mode"], "logging.wandb_project is null", "logging.wandb_project=NAME"
    elif config.logging.wandb_mode == "disabled":
        yield ["logging.wandb_project", *others], "logging.wandb_mode is disabled", "logging.wandb_mode=online"


def _precision(config: Config) -> Iterator[Idle]:
    precision = config.precision
    if precision.mode != "fp8":
        fp8 = [key for key in config_fields() if key.startswith("precision.fp8_")]
        fp8 += _in_precision("amax_reduction", "override_linear_precision", *_BF16_LAYERS)
        yield fp8, f"precision.mode is {precision.mode}", "precision.mode=fp8, or leave the key out"
    else:
        yield from _fp8(config)
    if precision.mode != "fp16":
        reason = f"precision.mode is {precision.mode}"
        yield _in_precision(*_LOSS_SCALE), reason, "precision.mode=fp16, or leave the key out"
    elif precision.loss_scale is not None:
        reason = f"precision.loss_scale is {precision.loss_scale:g}, a constant"
        yield _in_precision(*_LOSS_SCALE[1:]), reason, "precision.loss_scale=null, or leave the key out"


def _fp8(config: Config) -> Iterator[Idle]:
    precision = config.precision
    if precision.fp8_recipe != "delayed":
        reason = f"precision.fp8_recipe is {precision.fp8_recipe}, whose scales need no history"
        yield _in_precision(*_DELAYED), reason, "precision.fp8_recipe=delayed, or leave the key out"
    if not precision.first_last_layers_bf16:
        reason = "precision.first_last_layers_bf16 is false"
        yield _in_precision(*_BF16_LAYERS[1:3]), reason, "precision.first_last_layers_bf16=true"
    elif precision.num_layers_at_start_in_bf16 == precision.num_layers_at_end_in_bf16 == 0:
        reason = "it means no layers at the start and none at the end"
        yield _in_precision(_BF16_LAYERS[0]), reason, "precision.num_layers_at_start_in_bf16 above 0"
    if not precision.fp8_fallback:
        keys = [key for key in config_fields() if key.startswith("precision.fp8_fallback_")]
        yield keys, "precision.fp8_fallback is false", "precision.fp8_fallback=true"


def _checkpoint(config: Config) -> Iterator[Idle]:
    settings = config.checkpoint
    if not settings.save:
        names = ("save_interval", "save_retain_interval", "keep_last", "async_save")
        yield [f"checkpoint.{name}" for name in names], "checkpoint.save is false", "checkpoint.save=true"
    elif settings.keep_last is None:
        yield ["checkpoint.save_retain_interval"], "checkpoint.keep_last is null: all stay", "checkpoint.keep_last=N"
    if settings.load is None:
        yield ["checkpoint.load_weights_only"], "checkpoint.load is null", "checkpoint.load=PATH"


def _optimizer(config: Config) -> Iterator[Idle]:
    optimizer = config.optimizer
    if optimizer.lr_decay_style != "WSD":
        keys = ["optimizer.lr_wsd_decay_style", "optimizer.lr_wsd_decay_iters"]
        style = f"optimizer.lr_decay_style is {optimizer.lr_decay_style}"
        yield keys, style, "optimizer.lr_decay_style=WSD, or leave the key out"
    if optimizer.lr_decay_style == "constant":
        keys = ["optimizer.min_lr", "optimizer.lr_decay_iters"]
        yield keys, "optimizer.lr_decay_style is constant", "another optimizer.lr_decay_style"
    if optimizer.lr_warmup_iters == 0:
        yield ["optimizer.lr_warmup_init"], "there is no warm-up", "optimizer.lr_warmup_iters above 0"


def _model(config: Config) -> Iterator[Idle]:
    model = config.model
    reason = f"model.position_embedding_type is {model.position_embedding_type}"
    if model.position_embedding_type != "rope":
        yield ["model.rotary_base", "model.rotary_percent"], reason, "leave the key out"
    if model.recompute_granularity == "none":
        reason = "model.recompute_granularity is none"
        yield ["model.recompute_num_layers"], reason, "model.recompute_granularity=full"


def _in_precision(*names: str) -> list[str]:
    return [f"precision.{name}" for name in names]
