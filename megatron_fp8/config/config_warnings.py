"""Warns of what is allowed but worth mentioning: keys without effect, sizes that cost more than they give.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.fields import config_fields
from megatron_fp8.config.layout import GemmShape, Layout
from megatron_fp8.config.load import DEFAULT, LoadedConfig
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.rules_model import PP
from megatron_fp8.config.rules_parallel import GLOBAL_BATCH
from megatron_fp8.config.schema import Config
from megatron_fp8.config.warnings_attention import unfused_attention_warnings

# Rates that large GEMMs and casts reach on an H100 SXM, about two thirds of its peaks.
BF16_FLOPS_PER_SECOND = 600e12
FP8_FLOPS_PER_SECOND = 1100e12
CAST_BYTES_PER_SECOND = 2.5e12
# A cast reads two bytes of BF16 and writes one FP8 byte twice: as it is and transposed.
_CAST_BYTES_PER_ELEMENT = 4
_SECONDS_PER_LAUNCH = 5e-6
_CASTS_PER_GEMM = 3
# Elements that share a scale with blockwise scaling.
_BLOCK = 128


def config_warnings(loaded: LoadedConfig, layout: Layout | None) -> list[Problem]:
    """What a person may want to know although the run can start; `layout` is None without a world size."""
    warnings = [*_keys_without_effect(loaded), *_overridden(loaded)]
    config, origins = loaded.config, loaded.origins
    if layout is None:
        return warnings
    if config.precision.mode == "fp8":
        saved, spent = fp8_seconds(layout.gemms, layout.num_microbatches)
        if saved < spent:
            warnings.append(
                Problem(
                    "precision.mode",
                    "fp8",
                    f"slower than BF16: on an H100 FP8 GEMMs save about {1e6 * saved:.0f} us per layer and "
                    f"micro-batch, its casts take {1e6 * spent:.0f} us",
                    "precision.mode=bf16 if speed matters, or larger per-rank sizes",
                    origins["precision.mode"],
                )
            )
    warnings += _gathers_in_bf16(loaded, layout)
    warnings += unfused_attention_warnings(loaded, layout)
    if layout.num_microbatches < layout.pipeline_model_parallel_size:
        warnings.append(
            Problem(
                GLOBAL_BATCH,
                layout.global_batch_size,
                f"gives {layout.num_microbatches} micro-batches for {PP}={layout.pipeline_model_parallel_size} stages, "
                "so some stages are always idle",
                "a larger global batch, smaller micro-batches or fewer stages",
                origins[GLOBAL_BATCH],
            )
        )
    return warnings


def _overridden(loaded: LoadedConfig) -> Iterator[Problem]:
    """What an Accelerate YAML says, and the config says otherwise."""
    for key, written in loaded.overridden.items():
        value = getattr(getattr(loaded.config, key.partition(".")[0]), key.partition(".")[2])
        reason = f"overrides {written.text} of the Accelerate file ({written.origin})"
        yield Problem(key, value, reason, "remove the key to use the file's value", loaded.origins[key])


def _gathers_in_bf16(loaded: LoadedConfig, layout: Layout) -> Iterator[Problem]:
    """TE gathers an activation in BF16 where a sequence-parallel shard does not divide into blocks of 128."""
    config = loaded.config
    precision, hidden = config.precision, config.model.hidden_size
    if precision.mode != "fp8" or precision.fp8_recipe != "blockwise" or not config.parallel.sequence_parallel:
        return
    tokens = layout.seq_length_per_rank * layout.micro_batch_size
    for key, size, name in (
        ("model.seq_length", tokens, "tokens per rank and micro-batch"),
        ("model.hidden_size", hidden, "features"),
    ):
        if size % _BLOCK:
            yield Problem(
                key,
                getattr(config.model, key.partition(".")[2]),
                f"with parallel.sequence_parallel and blockwise scaling, {size} {name} are not a multiple of {_BLOCK}, "
                "so activations are gathered in BF16, twice the bytes of FP8",
                f"a multiple of {_BLOCK} {name}",
                loaded.origins[key],
            )


def fp8_seconds(gemms: tuple[GemmShape, ...], num_microbatches: int) -> tuple[float, float]:
    """Estimated (seconds saved by FP8 GEMMs, seconds spent on casts) of a layer and micro-batch on an H100.

    Casts: input and output gradient each micro-batch, the weight once a step.
    """
    saved = spent = 0.0
    for gemm in gemms:
        flops = 3 * 2 * gemm.num_tokens * gemm.in_features * gemm.out_features
        saved += flops * (1 / BF16_FLOPS_PER_SECOND - 1 / FP8_FLOPS_PER_SECOND)
        elements = gemm.num_tokens * (gemm.in_features + gemm.out_features)
        elements += gemm.in_features * gemm.out_features // num_microbatches
        spent += elements * _CAST_BYTES_PER_ELEMENT / CAST_BYTES_PER_SECOND
        spent += _CASTS_PER_GEMM * _SECONDS_PER_LAUNCH
    return saved, spent


def _keys_without_effect(loaded: LoadedConfig) -> Iterator[Problem]:
    """Keys that were set to something else than their default and change nothing."""
    fields = config_fields()
    for keys, reason, use in idle_keys(loaded.config):
        for key in keys:
            spec = fields[key]
            value = getattr(getattr(loaded.config, spec.section), spec.name)
            # Not of a value that nobody wrote: ours, or Accelerate's where its file was read.
            if not loaded.origins[key].endswith(DEFAULT) and value != spec.default:
                yield Problem(key, value, f"no effect: {reason}", use, loaded.origins[key])


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
        yield keys, "training.eval_iters is 0", "training.eval_iters greater than 0"
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
        reason = "it covers no layers at the start or the end"
        yield _in_precision(_BF16_LAYERS[0]), reason, "precision.num_layers_at_start_in_bf16 greater than 0"
    if not precision.fp8_fallback:
        keys = [key for key in config_fields() if key.startswith("precision.fp8_fallback_")]
        yield keys, "precision.fp8_fallback is false", "precision.fp8_fallback=true"


def _checkpoint(config: Config) -> Iterator[Idle]:
    settings = config.checkpoint
    if not settings.save:
        names = ("save_interval", "save_retain_interval", "keep_last", "async_save")
        yield [f"checkpoint.{name}" for name in names], "checkpoint.save is false", "checkpoint.save=true"
    elif settings.keep_last is None:
        yield (
            ["checkpoint.save_retain_interval"],
            "checkpoint.keep_last is null, so all are kept",
            "checkpoint.keep_last=N",
        )
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
        yield ["optimizer.lr_warmup_init"], "there is no warmup", "optimizer.lr_warmup_iters greater than 0"


def _model(config: Config) -> Iterator[Idle]:
    model = config.model
    reason = f"model.position_embedding_type is {model.position_embedding_type}"
    if model.position_embedding_type != "rope":
        keys = [key for key in config_fields() if key.startswith(("model.rotary_", "model.rope_", "model.no_rope_"))]
        yield keys, reason, "leave the key out"
    elif model.rope_scaling_type != "longrope":
        keys = ["model.rope_short_factor", "model.rope_long_factor"]
        kind = model.rope_scaling_type
        keys += ["model.rope_beta_fast", "model.rope_beta_slow", "model.rope_truncate"] if kind != "yarn" else []
        keys += ["model.rope_low_freq_factor", "model.rope_high_freq_factor"] if kind != "llama3" else []
        keys += ["model.rope_attention_factor"] if kind != "yarn" else []
        keys += ["model.rope_scaling_factor", "model.original_max_position_embeddings"] if kind == "none" else []
        yield keys, f"model.rope_scaling_type is {kind}", "another model.rope_scaling_type, or leave the key out"
    if model.window_size is None:
        yield ["model.window_attn_skip_freq"], "model.window_size is null", "model.window_size=[N,0]"
    if model.recompute_granularity == "none":
        reason = "model.recompute_granularity is none"
        yield ["model.recompute_num_layers"], reason, "model.recompute_granularity=full"


def _in_precision(*names: str) -> list[str]:
    return [f"precision.{name}" for name in names]
