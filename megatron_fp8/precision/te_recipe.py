"""Owns the translation of an `Fp8Policy` into Transformer Engine's recipes and quantizers.

`override_linear_precision` has no recipe of TE's: a linear layer's operands are read twice, each time in one
direction (input: rows in fprop, columns in wgrad; weight: rows in fprop, columns in dgrad; output gradient: rows in
dgrad, columns in wgrad), so an override is a quantizer whose one direction is the identity, made by a
`CustomRecipe`. Must not know modules' names, groups or steps.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    Recipe,
)
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import DelayedScalingRequest, QuantizerRequest, QuantizerRole
from transformer_engine.pytorch.quantized_tensor import Quantizer

from megatron_fp8.precision.policy import Fp8Policy, GemmOverride

# Called with (amax, old scale, largest FP8 value, recipe); returns the new scale.
ScaleFunction = Callable[[Tensor, Tensor, float, Recipe], Tensor]
_TE_FORMATS = {"hybrid": Format.HYBRID, "e4m3": Format.E4M3}
# The GEMM that reads an operand's rows, and the one that reads its columns.
_GEMMS_OF_OPERAND = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}


def largest_number(policy: Fp8Policy, tensor_type: str) -> float:
    """The largest finite number of an operand's format; `tensor_type`: input, weight or grad_output."""
    maxima = _TE_FORMATS[policy.fp8_format].value
    return float(maxima.max_bwd if tensor_type == "grad_output" else maxima.max_fwd)


def te_recipe(
    policy: Fp8Policy, reduce_amax: bool, device: torch.device, compute_scale: ScaleFunction | None = None
) -> Recipe:
    """Transformer Engine's recipe for the policy; `compute_scale` replaces delayed scaling's formula."""
    fp8_format = _TE_FORMATS[policy.fp8_format]
    delayed: dict[str, Any] = {
        "margin": policy.margin,
        "fp8_format": fp8_format,
        "amax_history_len": policy.amax_history_len,
        "amax_compute_algo": policy.amax_compute_algo,
        "scaling_factor_compute_algo": compute_scale,
        "reduce_amax": reduce_amax,
    }
    if policy.override:
        request = DelayedScalingRequest(**delayed) if policy.recipe == "delayed" else None
        return CustomRecipe(qfactory=_overriding_factory(policy, device, request), fp8_format=fp8_format)
    if policy.recipe == "tensorwise":
        return Float8CurrentScaling(fp8_format=fp8_format)
    if policy.recipe == "blockwise":
        return Float8BlockScaling(fp8_format=fp8_format)
    if policy.recipe == "mxfp8":
        return MXFP8BlockScaling(fp8_format=fp8_format)
    return DelayedScaling(**delayed)


def override_quantizers(module: TransformerEngineBaseModule, override: GemmOverride) -> None:
    """Take the overridden directions out of a module's delayed-scaling quantizers.

    TE makes those itself, one a slot, since they share the module's scales; it cannot make them direction by
    direction. The module's FP8 metadata must have been made.
    """
    for direction, quantizers in module.quantizers.items():
        for slot, (role, quantizer) in enumerate(zip(module.fp8_meta[direction].roles, quantizers, strict=True)):
            if role is not None:
                quantizers[slot] = _overriding(quantizer, role.tensor_type, override)


def _overriding_factory(
    policy: Fp8Policy, device: torch.device, delayed: DelayedScalingRequest | None
) -> Callable[[QuantizerRole | None], Quantizer | QuantizerRequest]:
    """What a `CustomRecipe` calls for each operand of each linear layer; `delayed`: the answer with that recipe."""

    def factory(role: QuantizerRole | None) -> Quantizer | QuantizerRequest:
        if delayed is not None:
            return delayed
        tensor_type = role.tensor_type if role is not None else ""
        return _overriding(_quantizer(policy, tensor_type, device), tensor_type, policy.override)

    return factory


def fresh_quantizer(policy: Fp8Policy, tensor_type: str, device: torch.device) -> Quantizer:
    """A quantizer without a past: the recipe's own, and tensorwise scaling in the place of delayed scaling."""
    if policy.recipe == "delayed":
        policy = replace(policy, recipe="tensorwise")
    return _quantizer(policy, tensor_type, device)


def _quantizer(policy: Fp8Policy, tensor_type: str, device: torch.device) -> Quantizer:
    """The quantizer that TE's own recipe of the policy makes for an operand."""
    backward = tensor_type == "grad_output" and policy.fp8_format == "hybrid"
    dtype = DType.kFloat8E5M2 if backward else DType.kFloat8E4M3
    if policy.recipe == "tensorwise":
        return te.Float8CurrentScalingQuantizer(dtype, device=device)
    if policy.recipe == "blockwise":
        dimensions = 2 if tensor_type == "weight" else 1
        return te.Float8BlockQuantizer(dtype, rowwise=True, columnwise=True, block_scaling_dim=dimensions)
    return te.MXFP8Quantizer(dtype)


def _overriding(quantizer: Quantizer, tensor_type: str, override: GemmOverride) -> Quantizer:
    """`quantizer`, with the identity in the directions that overridden GEMMs read."""
    if tensor_type not in _GEMMS_OF_OPERAND:
        return quantizer
    rows, columns = (getattr(override, gemm) for gemm in _GEMMS_OF_OPERAND[tensor_type])
    if rows and columns:
        return te.IdentityQuantizer()
    if rows:
        return te.HybridQuantizer(rowwise_quantizer=te.IdentityQuantizer(), columnwise_quantizer=quantizer)
    if columns:
        return te.HybridQuantizer(rowwise_quantizer=quantizer, columnwise_quantizer=te.IdentityQuantizer())
    return quantizer
