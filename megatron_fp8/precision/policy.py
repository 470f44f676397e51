"""The precision policy: the number formats of a run as plain data, from the config's `precision` section.

Imports no torch.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_fp8.config.fp8_formats import layers_in_bf16, resolved_fp8_format
from megatron_fp8.config.schema_model import PrecisionConfig

Fp8Format = Literal["hybrid", "e4m3"]
Fp8Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
# Names of the lists in which a checkpoint's manifest has the state of the FP8 fallback.
FALLBACK_LISTS = (FALLEN_BACK, COUNTED_LAYERS, COUNTS) = ("fallen_back", "counted_layers", "counts")
# A run that recovers may overflow in a few consecutive batches, but not in this many.
_MAX_CONSECUTIVE_OVERFLOWS = 10


@dataclass(frozen=True)
class GemmOverride:
    """Which of the three GEMMs of an FP8 layer run in the parameters' dtype instead."""

    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False

    def __bool__(self) -> bool:
        return self.fprop or self.dgrad or self.wgrad


@dataclass(frozen=True)
class HealthPolicy:
    """How FP8 tensors are monitored.

    `interval`: steps between checks of their data; 0: never. `fallback`: whether a layer falls back to BF16 after
    `num_checks` consecutive checks with a tensor over one of the limits (see `tensor_health.TensorHealth`), and returns
    after `num_healthy_checks` healthy ones (0: never).
    """

    interval: int
    fallback: bool
    num_checks: int
    num_healthy_checks: int
    max_clipped: float
    max_flushed: float
    max_error: float


@dataclass(frozen=True)
class Fp8Policy:
    """FP8 of the transformer layers.

    `fp8_format`: `hybrid` (E4M3 forward, E5M2 backward) or `e4m3`. `margin` (headroom in powers of two), `interval` and
    `amax_*` belong to delayed scaling. `evaluate`: use FP8 in evaluation too. `bf16_layers`: global numbers, from 0, of
    layers that stay in BF16.
    """

    recipe: Fp8Recipe
    fp8_format: Fp8Format
    margin: int
    interval: int
    amax_history_len: int
    amax_compute_algo: str
    override: GemmOverride
    evaluate: bool
    param_gather: bool
    bf16_layers: frozenset[int]
    health: HealthPolicy


@dataclass(frozen=True)
class OptimizerFormats:
    """Formats of master weights, gradients and moments: fp32, fp16, bf16 or fp8."""

    main_params: str
    main_grads: str
    exp_avg: str
    exp_avg_sq: str

    @property
    def all_fp32(self) -> bool:
        """Whether Megatron's ordinary optimizer suffices."""
        return {self.main_params, self.main_grads, self.exp_avg, self.exp_avg_sq} == {"fp32"}


@dataclass(frozen=True)
class LossScaling:
    """FP16 loss scaling; `constant` None: dynamic (Megatron's `DynamicGradScaler`).

    A step that overflows is skipped and lowers a dynamic scale: routine, because the scale is raised until that
    happens. A scale that is constant or at its minimum cannot fall, and Megatron would skip forever.
    """

    constant: float | None
    initial: float
    minimum: float
    growth_interval: int
    hysteresis: int

    def overflows_in_a_row(self, before: int, skipped: bool, loss_scale: float) -> int:
        """Consecutive steps up to this one that overflowed under a scale that cannot fall.

        `before`: up to the previous step; `loss_scale`: after this step.
        """
        falls = self.constant is None and loss_scale > self.minimum
        return before + 1 if skipped and not falls else 0

    def overflow_problem(self, consecutive: int, loss_scale: float) -> str | None:
        """The error after too many of these overflows, else None."""
        if consecutive < _MAX_CONSECUTIVE_OVERFLOWS:
            return None
        if self.constant is None:
            why = f"precision.min_loss_scale={self.minimum:g}; lower it if the activations are finite"
        else:
            why = f"precision.loss_scale={self.constant:g} is constant; null makes it dynamic"
        return (
            f"gradients were not finite in {consecutive} consecutive steps, under a loss scale of {loss_scale:g} that "
            f"cannot fall further ({why}). Use precision.mode=bf16, lower optimizer.lr, lengthen "
            "optimizer.lr_warmup_iters, or inspect the data of these steps"
        )


@dataclass(frozen=True)
class PrecisionPolicy:
    """Number formats of a run; `fp8` and `loss_scaling` are None in modes without them.

    `params_dtype`: name of the torch dtype of parameters and of the residual stream.
    """

    mode: str
    params_dtype: str
    fp8: Fp8Policy | None
    optimizer: OptimizerFormats
    loss_scaling: LossScaling | None


_PARAMS_DTYPE = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}


def build_policy(config: PrecisionConfig, num_layers: int) -> PrecisionPolicy:
    """The policy of a config for a model with `num_layers` transformer layers."""
    return PrecisionPolicy(
        mode=config.mode,
        params_dtype=_PARAMS_DTYPE[config.mode],
        fp8=_fp8_policy(config, num_layers) if config.mode == "fp8" else None,
        optimizer=OptimizerFormats(
            main_params=config.main_params_dtype,
            main_grads=config.main_grads_dtype,
            exp_avg=config.exp_avg_dtype,
            exp_avg_sq=config.exp_avg_sq_dtype,
        ),
        loss_scaling=LossScaling(
            constant=config.loss_scale,
            initial=config.initial_loss_scale,
            minimum=config.min_loss_scale,
            growth_interval=config.loss_scale_window,
            hysteresis=config.hysteresis,
        )
        if config.mode == "fp16"
        else None,
    )


def _fp8_policy(config: PrecisionConfig, num_layers: int) -> Fp8Policy:
    return Fp8Policy(
        recipe=config.fp8_recipe,
        fp8_format=resolved_fp8_format(config),
        margin=config.fp8_margin,
        interval=config.fp8_interval,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
        override=GemmOverride(*config.override_linear_precision),
        evaluate=config.fp8_eval,
        param_gather=config.fp8_param_gather,
        bf16_layers=layers_in_bf16(config, num_layers),
        health=HealthPolicy(
            interval=config.fp8_health_interval,
            fallback=config.fp8_fallback,
            num_checks=config.fp8_fallback_num_checks,
            num_healthy_checks=config.fp8_fallback_num_healthy_checks,
            max_clipped=config.fp8_fallback_max_clipped,
            max_flushed=config.fp8_fallback_max_flushed,
            max_error=config.fp8_fallback_max_error,
        ),
    )
