"""Translates a precision policy into keyword arguments of Megatron Core's configs."""

from typing import Any

import torch

from megatron_fp8.precision.policy import PrecisionPolicy

# For Transformer Engine's FusedAdam uint8 means FP8 (E4M3) with one scale per tensor.
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}


def model_formats(policy: PrecisionPolicy) -> dict[str, Any]:
    """For `TransformerConfig`: the format of parameters and of what stages send each other."""
    dtype: torch.dtype = getattr(torch, policy.params_dtype)
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
    }


def gradient_formats(policy: PrecisionPolicy) -> dict[str, Any]:
    """For `DistributedDataParallelConfig`: accumulate and reduce gradients in FP32 or in the parameters' dtype.

    Megatron never casts them afterwards, so this settles `main_grads`; bf16 there requires BF16 parameters.
    """
    return {
        "grad_reduce_in_fp32": policy.optimizer.main_grads == "fp32",
        "fp8_param_gather": policy.fp8 is not None and policy.fp8.param_gather,
    }


def optimizer_formats(policy: PrecisionPolicy) -> dict[str, Any]:
    """For `OptimizerConfig`: parameters, master weights, moments, loss scale.

    Master weights are whole FP32 numbers. By default Megatron keeps only the 16 bits that BF16 parameters lack, which
    saves two bytes per parameter, and writes those to checkpoints, where nothing else can read them.
    """
    formats, scaling = policy.optimizer, policy.loss_scaling
    arguments = {name: value for name, value in model_formats(policy).items() if name != "pipeline_dtype"}
    if not formats.all_fp32:
        arguments |= {
            "use_precision_aware_optimizer": True,
            "store_param_remainders": False,
            "main_params_dtype": _DTYPES[formats.main_params],
            "main_grads_dtype": _DTYPES[formats.main_grads],
            "exp_avg_dtype": _DTYPES[formats.exp_avg],
            "exp_avg_sq_dtype": _DTYPES[formats.exp_avg_sq],
        }
    if policy.fp8 is not None and policy.fp8.param_gather:
        # Tells Megatron whether a weight can be split; without it, Megatron assumes delayed scaling.
        arguments["fp8_recipe"] = policy.fp8.recipe
    if scaling is not None:
        arguments |= {
            "loss_scale": scaling.constant,
            "initial_loss_scale": scaling.initial,
            "min_loss_scale": scaling.minimum,
            "loss_scale_window": scaling.growth_interval,
            "hysteresis": scaling.hysteresis,
        }
    return arguments
