"""Owns the refusal of an FP8 recipe that this device does not run, before a model is built.

Transformer Engine knows which recipe needs which device; it says so in the first forward pass. Must not know modules.
"""

from collections.abc import Callable

from transformer_engine.pytorch import (
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
)
from transformer_engine.pytorch.utils import get_device_compute_capability

from megatron_fp8.config.problem import ConfigError, Problem
from megatron_fp8.precision.policy import Fp8Policy, Fp8Recipe

_RECIPE = "precision.fp8_recipe"
# The finest scaling first.
_AVAILABILITY: dict[Fp8Recipe, Callable[..., tuple[bool, str]]] = {
    "mxfp8": is_mxfp8_available,
    "blockwise": is_fp8_block_scaling_available,
    "tensorwise": is_fp8_available,
    "delayed": is_fp8_available,
}


def why_unsupported(recipe: Fp8Recipe) -> str | None:
    """Why this device does not run the recipe, in Transformer Engine's words; None: it does."""
    available, reason = _AVAILABILITY[recipe](return_reason=True)
    return None if available else reason


def require_device_support(policy: Fp8Policy) -> None:
    """Raise ConfigError if this device does not run the policy's recipe, naming the nearest one that it does."""
    reason = why_unsupported(policy.recipe)
    if reason is None:
        return
    major, minor = get_device_compute_capability()
    others = [recipe for recipe in _AVAILABILITY if why_unsupported(recipe) is None]
    use_instead = f"{_RECIPE}={others[0]}" if others else "precision.mode=bf16"
    why = f"this device has compute capability {major}.{minor}, and Transformer Engine says: {reason}"
    raise ConfigError.from_problems([Problem(_RECIPE, policy.recipe, why, use_instead)])
