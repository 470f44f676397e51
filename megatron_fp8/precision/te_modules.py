"""Owns what is done to Transformer Engine's modules beyond calling them: making their FP8 state before they run.

TE makes it in the first forward pass, too late to load a checkpoint's into it or to take out overridden GEMMs.
Must not know groups, steps or layer numbers.
"""

from torch import nn
from transformer_engine.pytorch import LayerNormLinear, LayerNormMLP, Linear
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megatron_fp8.precision.policy import Fp8Policy
from megatron_fp8.precision.te_recipe import override_quantizers


def init_fp8_modules(layer: nn.Module, policy: Fp8Policy) -> None:
    """Make the FP8 state of every linear layer below `layer`; called inside the layer's FP8 region."""
    for module in linear_modules(layer).values():
        module.init_fp8_metadata(num_gemms=num_gemms(module))
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
        if policy.override and policy.recipe == "delayed":
            override_quantizers(module, policy.override)


def linear_modules(layer: nn.Module) -> dict[str, TransformerEngineBaseModule]:
    """TE's modules with weights below `layer`, by name, in order."""
    return {
        name: module
        for name, module in layer.named_modules()
        if isinstance(module, (Linear, LayerNormLinear, LayerNormMLP))
    }


def num_gemms(module: TransformerEngineBaseModule) -> int:
    """Linear layers inside the module: `LayerNormMLP` holds two."""
    return 2 if isinstance(module, LayerNormMLP) else 1
