"""Translates an `Fp8Policy` into Transformer Engine's recipes, quantizers and module state.

TE has no recipe for `override_linear_precision`. Two GEMMs read each operand of a linear layer, each in its own
direction (input: rows in fprop, columns in wgrad; weight: rows in fprop, columns in dgrad; output gradient: rows in
dgrad, columns in wgrad), so an override is a quantizer whose one direction is the identity, made by a `CustomRecipe`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantized_tensor import Quantizer
from transformer_engine.pytorch.utils import get_device_compute_capability

from megatron_fp8.config.problem import ConfigError, Problem
from megatron_fp8.precision.policy import Fp8Policy, Fp8Recipe, GemmOverride

# (amax, old scale, largest FP8 value, recipe) -> new scale.
ScaleFunction = Callable[[Tensor, Tensor, float, recipes.Recipe], Tensor]
_TE_FORMATS = {"hybrid": recipes.Format.HYBRID, "e4m3": recipes.Format.E4M3}
# The GEMMs that read an operand's rows and its columns.
_GEMMS_OF_OPERAND = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}
# Finest scaling first.
_AVAILABILITY: dict[Fp8Recipe, Callable[..., tuple[bool, str]]] = {
    "mxfp8": te.is_mxfp8_available,
    "blockwise": te.is_fp8_block_scaling_available,
    "tensorwise": te.is_fp8_available,
    "delayed": te.is_fp8_available,
}


def largest_number(policy: Fp8Policy, tensor_type: str) -> float:
    """Largest finite value of an operand's format; `tensor_type`: input, weight or grad_output."""
    maxima = _TE_FORMATS[policy.fp8_format].value
    return float(maxima.max_bwd if tensor_type == "grad_output" else maxima.max_fwd)


def why_unsupported(recipe: Fp8Recipe) -> str | None:
    """TE's reason why this device does not support the recipe; None if it does."""
    available, reason = _AVAILABILITY[recipe](return_reason=True)
    return None if available else reason


def require_device_support(policy: Fp8Policy) -> None:
    """Raise ConfigError if this device does not support the policy's recipe, naming the nearest one that it does.

    TE itself says so only in the first forward pass.
    """
    reason = why_unsupported(policy.recipe)
    if reason is None:
        return
    major, minor = get_device_compute_capability()
    others = [recipe for recipe in _AVAILABILITY if why_unsupported(recipe) is None]
    use_instead = f"precision.fp8_recipe={others[0]}" if others else "precision.mode=bf16"
    why = f"this device has compute capability {major}.{minor}; Transformer Engine: {reason}"
    raise ConfigError.from_problems([Problem("precision.fp8_recipe", policy.recipe, why, use_instead)])


def te_recipe(
    policy: Fp8Policy, reduce_amax: bool, device: torch.device, compute_scale: ScaleFunction | None = None
) -> recipes.Recipe:
    """TE's recipe for the policy; `compute_scale` replaces the formula of delayed scaling."""
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

        def factory(role: quantization.QuantizerRole | None) -> Quantizer | quantization.QuantizerRequest:
            if policy.recipe == "delayed":
                return quantization.DelayedScalingRequest(**delayed)
            tensor_type = role.tensor_type if role is not None else ""
            return _overriding(_quantizer(policy, tensor_type, device), tensor_type, policy.override)

        return recipes.CustomRecipe(qfactory=factory, fp8_format=fp8_format)
    if policy.recipe == "tensorwise":
        return recipes.Float8CurrentScaling(fp8_format=fp8_format)
    if policy.recipe == "blockwise":
        return recipes.Float8BlockScaling(fp8_format=fp8_format)
    if policy.recipe == "mxfp8":
        return recipes.MXFP8BlockScaling(fp8_format=fp8_format)
    return recipes.DelayedScaling(**delayed)


def init_fp8_modules(layer: nn.Module, policy: Fp8Policy) -> None:
    """Make the FP8 state of every linear layer in `layer`; called inside the layer's FP8 region.

    TE makes it in the first forward pass, too late to load a checkpoint into it or to remove overridden GEMMs.
    """
    for module in linear_modules(layer).values():
        module.init_fp8_metadata(num_gemms=num_gemms(module))
        quantization.FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
        if policy.override and policy.recipe == "delayed":
            override_quantizers(module, policy.override)


def linear_modules(layer: nn.Module) -> dict[str, TransformerEngineBaseModule]:
    """TE's modules with weights in `layer`, itself included (as ""), by name, in order."""
    return {
        name: module
        for name, module in layer.named_modules()
        if isinstance(module, (te.Linear, te.LayerNormLinear, te.LayerNormMLP))
    }


def num_gemms(module: TransformerEngineBaseModule) -> int:
    """Linear layers inside the module: `LayerNormMLP` holds two."""
    return 2 if isinstance(module, te.LayerNormMLP) else 1


def override_quantizers(module: TransformerEngineBaseModule, override: GemmOverride) -> None:
    """Remove the overridden directions from a module's delayed-scaling quantizers; its FP8 state exists.

    TE makes these itself, one per slot, because they share the module's scales; it cannot make them per direction.
    """
    for direction, quantizers in module.quantizers.items():
        for slot, (role, quantizer) in enumerate(zip(module.fp8_meta[direction].roles, quantizers, strict=True)):
            if role is not None:
                quantizers[slot] = _overriding(quantizer, role.tensor_type, override)


def fresh_quantizer(policy: Fp8Policy, tensor_type: str, device: torch.device) -> Quantizer:
    """A stateless quantizer (no amax history): the recipe's own, with tensorwise in place of delayed scaling."""
    if policy.recipe == "delayed":
        policy = replace(policy, recipe="tensorwise")
    return _quantizer(policy, tensor_type, device)


def _quantizer(policy: Fp8Policy, tensor_type: str, device: torch.device) -> Quantizer:
    """The quantizer that TE's own recipe makes for an operand."""
    backward = tensor_type == "grad_output" and policy.fp8_format == "hybrid"
    dtype = DType.kFloat8E5M2 if backward else DType.kFloat8E4M3
    if policy.recipe == "tensorwise":
        return te.Float8CurrentScalingQuantizer(dtype, device=device)
    if policy.recipe == "blockwise":
        dimensions = 2 if tensor_type == "weight" else 1
        return te.Float8BlockQuantizer(dtype, rowwise=True, columnwise=True, block_scaling_dim=dimensions)
    return te.MXFP8Quantizer(dtype)


def _overriding(quantizer: Quantizer, tensor_type: str, override: GemmOverride) -> Quantizer:
    """`quantizer` with the identity in the directions that overridden GEMMs read."""
    if tensor_type not in _GEMMS_OF_OPERAND:
        return quantizer
    rows, columns = (getattr(override, gemm) for gemm in _GEMMS_OF_OPERAND[tensor_type])
    if rows and columns:
        return te.IdentityQuantizer()
    if not rows and not columns:
        return quantizer
    row_quantizer = te.IdentityQuantizer() if rows else quantizer
    column_quantizer = te.IdentityQuantizer() if columns else quantizer
    return te.HybridQuantizer(rowwise_quantizer=row_quantizer, columnwise_quantizer=column_quantizer)
