"""FP32 masters against an AdamW of this file's own (NumPy), given the same gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.precision.gradients import after_reduction, parameters
from tests.ranks import run_on_ranks
from tests.small_run import batches, run_small, small_config

LR, WEIGHT_DECAY, BETA1, BETA2, EPSILON, CLIP = 2e-3, 0.1, 0.9, 0.95, 1e-8, 0.5
NUM_STEPS = 10
SINGLE, DOUBLE = np.float32, np.float64
Array = np.ndarray


def fused_multiply_add(a: Array, b: Array, c: Array) -> Array:
    """FP32 `a b + c` rounded once (FP64 holds the product exactly)."""
    return (a.astype(DOUBLE) * b.astype(DOUBLE) + c.astype(DOUBLE)).astype(SINGLE)


class AdamW:
    """AdamW (Loshchilov and Hutter, 2019) of one parameter, all in FP32, in the order of torch's CPU kernel.

    Decay first: w (1 - lr d). The moments are m + (1 - beta1) (g - m) and beta2 v + ((1 - beta2) g) g, each with one
    fused multiply-add. The step is lr / (1 - beta1^t) times m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon).
    """

    def __init__(self, master: Array, weight_decay: float) -> None:
        self.master, self.weight_decay = master.copy(), weight_decay
        self.m, self.v = np.zeros_like(master), np.zeros_like(master)
        self.num_steps = 0

    def step(self, g: Array) -> None:
        self.num_steps += 1
        correction1, correction2 = 1 - BETA1**self.num_steps, 1 - BETA2**self.num_steps
        self.master = self.master * SINGLE(1 - LR * self.weight_decay)
        self.m = fused_multiply_add(g - self.m, SINGLE(1 - BETA1), self.m)
        self.v = fused_multiply_add(SINGLE(1 - BETA2) * g, g, self.v * SINGLE(BETA2))
        denominator = np.sqrt(self.v) / SINGLE(np.sqrt(correction2)) + SINGLE(EPSILON)
        self.master = self.master - SINGLE(LR / correction1) * self.m / denominator


def textbook_step(w: Array, m: Array, v: Array, g: Array, step: int, weight_decay: float) -> tuple[Array, Array]:
    """One step in FP64, which stands for exact arithmetic: the new weight, and its size before terms cancel."""
    w, m, v, g = (array.astype(DOUBLE) for array in (w, m, v, g))
    v = BETA2 * v + (1 - BETA2) * g**2
    factor = LR / (1 - BETA1**step) / (np.sqrt(v / (1 - BETA2**step)) + EPSILON)
    old, new = factor * BETA1 * m, factor * (1 - BETA1) * g
    return w - LR * weight_decay * w - (old + new), np.maximum(np.abs(w), np.abs(old) + np.abs(new))


def optimizer_gradients(gradients: list[Array], loss_scale: float, norm: float) -> list[Array]:
    """Unscaled and clipped, each in one FP32 multiplication as Megatron does."""
    unscaled = [g * SINGLE(1 / DOUBLE(loss_scale)) for g in gradients]
    coefficient = CLIP / (norm + 1e-6)
    return [g * SINGLE(coefficient) for g in unscaled] if coefficient < 1 else unscaled


def follow(parts) -> dict[str, Any]:
    """Ten steps of the model, beside ten of `AdamW` from the same masters and gradients."""
    seen: list[list[Array]] = []
    fused, weights = parts.optimizer.optimizer, parameters(parts)

    def flat(tensor: Any) -> Array:
        return tensor.detach().float().view(-1).cpu().numpy().copy()

    decays = {id(master): group["weight_decay"] for group in fused.param_groups for master in group["params"]}
    after_reduction(parts, lambda: seen.append([flat(p.main_grad) for p in weights]))
    references = [AdamW(flat(p.main_param), decays[id(p.main_param)]) for p in weights]
    # Masters start from the parameters, exactly.
    worst_ulps, bit_equal, norm_error, clipped = [], [], [], 0
    starts_equal = all(bool((flat(p) == r.master).all()) for p, r in zip(weights, references, strict=True))
    for step in range(1, NUM_STEPS + 1):
        loss_scale = float(parts.optimizer.get_loss_scale())
        before = [(flat(p.main_param), *moments(fused, p)) for p in weights]
        result = parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
        gradients = optimizer_gradients(seen[-1], loss_scale, result.grad_norm)
        norm = np.sqrt(sum((g.astype(DOUBLE) ** 2).sum() for g in seen[-1])) / loss_scale
        norm_error.append(abs(result.grad_norm / norm - 1))
        clipped += result.grad_norm > CLIP
        for p, reference, g, (w, m, v) in zip(weights, references, gradients, before, strict=True):
            reference.step(g)
            actual = flat(p.main_param)
            bit_equal.append(float((actual == reference.master).mean()))
            exact, size = textbook_step(w, m, v, g, step, reference.weight_decay)
            worst_ulps.append(float((np.abs(actual - exact) / np.spacing(size.astype(SINGLE))).max()))
    rounded = all(bool((p.detach().view(-1) == p.main_param.view(-1).to(p.dtype)).all()) for p in weights)
    return {
        "starts equal": starts_equal,
        "bit equal": min(bit_equal),
        "ulps": max(worst_ulps),
        "norm": max(norm_error),
        "clipped": clipped,
        "decays": set(decays.values()),
        "parameters are the masters rounded": rounded,
        "dtypes": {str(p.main_param.dtype) for p in weights},
    }


def moments(fused: Any, parameter: Any) -> tuple[Array, Array]:
    state = fused.state.get(parameter.main_param)
    if not state:
        zero = np.zeros(parameter.numel(), SINGLE)
        return zero, zero
    return state["exp_avg"].view(-1).cpu().numpy().copy(), state["exp_avg_sq"].view(-1).cpu().numpy().copy()


@pytest.mark.parametrize(("mode", "distributed"), [("bf16", True), ("fp16", True), ("fp8", True), ("fp16", False)])
def test_masters_equal_an_independent_adamw(mode: str, distributed: bool) -> None:
    config = small_config(
        model={"num_layers": 2},
        precision={"mode": mode, "initial_loss_scale": 2.0**11},
        parallel={"use_distributed_optimizer": distributed},
        training={"global_batch_size": 4},
        optimizer={
            "lr": LR,
            "min_lr": LR,
            "lr_decay_style": "constant",
            "weight_decay": WEIGHT_DECAY,
            "adam_beta1": BETA1,
            "adam_beta2": BETA2,
            "adam_eps": EPSILON,
            "clip_grad": CLIP,
        },
    )
    (record,) = run_on_ranks(1, run_small, config, 0, follow)
    seen = record.probe
    assert seen["bit equal"] == 1.0
    # Against exact arithmetic, step by step: about ten roundings of at most one unit in the last place each, of which
    # those in the update do not show unless a weight is as small as its update.
    assert seen["ulps"] <= 8.0
    assert seen["norm"] < 1e-6
    assert seen["clipped"] > NUM_STEPS / 2
    assert seen["decays"] == {0.0, WEIGHT_DECAY}
    assert seen["starts equal"]
    assert seen["parameters are the masters rounded"]
    assert seen["dtypes"] == {"torch.float32"}


def small_updates(num_steps: int) -> dict[str, float]:
    """Updates of 1e-4 (Adam's with a constant gradient, whatever its size) to norm weights, which start at 1."""
    import torch
    from transformer_engine.pytorch.optimizers import FusedAdam

    def probe(parts) -> dict[str, float]:
        weights = parameters(parts)
        alone = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16, device="cuda"))
        without_masters = FusedAdam([alone], lr=1e-4, weight_decay=0.0)
        for _ in range(num_steps):
            for p in weights:
                p.main_grad.fill_(1.0)
            parts.optimizer.step()
            alone.grad = torch.ones_like(alone)
            without_masters.step()
        norm = parts.chunks[0].module.final_norm.weight
        return {
            "without": float(alone[0]),
            "master": float(norm.main_param[0]),
            "weight": float(norm[0]),
        }

    optimizer = {"lr": 1e-4, "min_lr": 1e-4, "lr_decay_style": "constant", "weight_decay": 0.0, "clip_grad": 0.0}
    return run_small(small_config(precision={"mode": "bf16"}, optimizer=optimizer), 0, probe).probe


def test_updates_below_bf16s_resolution_are_kept_by_masters_only() -> None:
    (seen,) = run_on_ranks(1, small_updates, 100)
    # BF16 has nothing between 1 - 2^-8 and 1.
    assert seen["without"] == 1.0
    # A hundred roundings of at most half a unit in the last place below 1.
    assert seen["master"] == pytest.approx(0.99, abs=100 * 2**-25)
    assert seen["weight"] == pytest.approx(0.99, abs=2**-9)
