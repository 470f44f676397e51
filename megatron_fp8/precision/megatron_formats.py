"""Owns what Megatron Core is told about number formats, as keyword arguments of its configs.

Must not know the rest of those configs.
"""

from typing import Any

import torch

from megatron_fp8.precision.policy import PrecisionPolicy

# Transformer Engine's FusedAdam takes bytes for "FP8 (E4M3) with one scale a tensor".
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}


def model_formats(policy: PrecisionPolicy) -> dict[str, Any]:
    """For `TransformerConfig`: parameters, what stages send each other, and which 16-bit format that is."""
    dtype: torch.dtype = getattr(torch, policy.params_dtype)
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
    }


def gradient_formats(policy: PrecisionPolicy) -> dict[str, Any]:
    """For `DistributedDataParallelConfig`: gradients are added up and reduced in FP32 or else in the parameters' dtype.

    Megatron never casts them afterwards, so `main_grads` is settled here and means BF16 under BF16 parameters only.
    """
    return {
        "grad_reduce_in_fp32": policy.optimizer.main_grads == "fp32",
        "fp8_param_gather": policy.fp8 is not None and policy.fp8.param_gather,
    }


def optimizer_formats(policy: PrecisionPolicy) -> dict[str, Any]:
    """For `OptimizerConfig`: parameters, masters, moments, loss scale.

    Masters are kept whole. Megatron by default keeps of FP32 masters only the 16 bits that BF16 parameters lack, which
    saves two bytes a parameter, and puts those bits, which nothing else can read, into checkpoints.
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
        # With it Megatron knows that a weight cannot be cut into pieces; without, it takes FP8 weights for delayed.
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
