"""Transformer Engine's own TransformerLayer on the stand-in, as training calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_fp8.cpu import install

install()

import transformer_engine.pytorch as te  # noqa: E402  (after the stand-in)
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling  # noqa: E402

HIDDEN, FFN, HEADS, SEQUENCE, BATCH = 64, 128, 4, 32, 2
RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling}
VARIANTS: dict[str, dict[str, Any]] = {
    "GPT": {"normalization": "LayerNorm", "activation": "gelu"},
    "Llama": {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "num_gqa_groups": 2},
    "unfused QKV": {"activation": "srelu", "fuse_qkv_params": False},
}


def layer(dtype: torch.dtype, dropout: float = 0.0, **options: Any) -> Any:
    torch.cuda.manual_seed(5)
    return te.TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        self_attn_mask_type="causal",
        params_dtype=dtype,
        **({"fuse_qkv_params": True} | options),
    )


def inputs(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(7)
    values = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator)
    return values.to(dtype).requires_grad_()


def run(module: Any, x: torch.Tensor, recipe: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    """Output, gradient of the input and gradients of the parameters after one forward and backward."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        output = te.checkpoint(module, x) if options.get("recompute") else module(x)
    weights = torch.linspace(-1, 1, HIDDEN)
    (output.float() * weights).square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"output": output.detach(), "input gradient": x.grad, **gradients}


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value.double() - reference.double()).norm() / reference.double().norm()).item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_and_fp8_follow_fp32(variant: str) -> None:
    exact = run(layer(torch.float32, **VARIANTS[variant]), inputs(torch.float32))
    for dtype, recipe, tolerance in [
        (torch.bfloat16, None, 0.01),
        (torch.float32, "delayed", 0.13),
        (torch.bfloat16, "delayed", 0.13),
        (torch.bfloat16, "current", 0.13),
    ]:
        module = layer(dtype, **VARIANTS[variant])
        if recipe == "delayed":
            # The first step only finds the scales.
            run(module, inputs(dtype), RECIPES[recipe]())
            module.zero_grad()
        results = run(module, inputs(dtype), RECIPES[recipe]() if recipe else None)
        assert results["output"].dtype == dtype
        for name, value in results.items():
            assert value is not None, name
            if "key_bias" in name:
                continue  # Its gradient is zero: softmax does not see a shift of all scores.
            error = relative(value, exact[name])
            assert error < tolerance, (dtype, recipe, name, error)
            assert error > 0, (dtype, recipe, name)


def test_delayed_scaling_takes_the_amax_of_the_last_step() -> None:
    module = layer(torch.bfloat16)
    for _ in range(3):
        run(module, inputs(torch.bfloat16), DelayedScaling(amax_history_len=4))
    meta = module.self_attention.layernorm_qkv.fp8_meta["scaling_fwd"]
    amax = module.self_attention.layernorm_qkv.weight.abs().max().float()
    assert meta.amax_history.shape[0] == 4
    assert (meta.amax_history[:, 1] == amax).sum() >= 2
    assert meta.scale[1] == 448 / amax


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_recompute_repeats_dropout_bit_for_bit(recipe: str | None) -> None:
    results = []
    for recompute in (False, True):
        module = layer(torch.bfloat16, dropout=0.25)
        torch.cuda.manual_seed(31)
        made = RECIPES[recipe]() if recipe else None
        results.append(run(module, inputs(torch.bfloat16), made, recompute=recompute))
        results[-1]["next draw"] = torch.rand(3, device="cuda")
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_dropout_is_drawn_from_the_cuda_generator() -> None:
    module = layer(torch.bfloat16, dropout=0.25)
    outputs = []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(seed)
        outputs.append(module(inputs(torch.bfloat16)).detach())
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_rng_tracker_of_transformer_engine() -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 99)
    torch.cuda.manual_seed(1)
    outside = torch.cuda.get_rng_state()
    with tracker.fork():
        first = torch.rand(4)
    assert torch.equal(torch.cuda.get_rng_state(), outside)
    states = tracker.get_states()
    with tracker.fork():
        second = torch.rand(4)
    assert not torch.equal(first, second)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(4), second)
