"""Masters, gradients and moments in other formats than FP32: the real state tensors, and what they do to training."""

from __future__ import annotations

from typing import Any

import pytest

from tests.precision.gradients import parameters
from tests.ranks import run_on_ranks
from tests.small_run import run_small, small_config

KEYS = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
NUM_STEPS = 10
# FP32, then the kernel's fused path (both moments BF16), mixed moments, FP16 with its scales, FP8, all at once.
FORMATS = [
    ("fp32", "fp32", "bf16", "bf16"),
    ("fp32", "bf16", "fp32", "bf16"),
    ("fp16", "fp32", "fp16", "fp16"),
    ("fp32", "fp32", "fp8", "fp16"),
    ("fp16", "bf16", "fp8", "fp8"),
]


def formats_config(mode: str, formats: tuple[str, ...], parallel: dict[str, Any] | None = None):
    precision = {"mode": mode, "initial_loss_scale": 2.0**11, **dict(zip(KEYS, formats, strict=True))}
    training = {"global_batch_size": 8}
    return small_config(model={"num_layers": 2}, precision=precision, parallel=parallel or {}, training=training)


def state_formats(parts) -> dict[str, Any]:
    """Formats of the optimizer's tensors as they are, and their bytes per parameter of this rank's share."""
    from transformer_engine.pytorch import Float8Tensor

    names = {"torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}
    fused = parts.optimizer.optimizer
    kinds: dict[str, set[str]] = {"main_grads": {names[str(p.main_grad.dtype)] for p in parameters(parts)}}
    num_parameters = num_bytes = 0
    for parameter, state in fused.state.items():
        num_parameters += parameter.numel()
        for name, value in state.items():
            stored = value._data if isinstance(value, Float8Tensor) else value
            kinds.setdefault(name, set()).add("fp8" if isinstance(value, Float8Tensor) else names[str(value.dtype)])
            num_bytes += stored.numel() * stored.element_size()
    return {"kinds": kinds, "bytes": num_bytes / num_parameters}


@pytest.fixture(scope="module")
def fp32_losses() -> dict[str, list[float]]:
    losses = {}
    for mode in ("bf16", "fp16", "fp8"):
        (record,) = run_on_ranks(1, run_small, formats_config(mode, ("fp32",) * 4), NUM_STEPS)
        losses[mode] = [step.loss for step in record.steps]
    return losses


@pytest.mark.parametrize(
    ("mode", "formats"),
    [*(("bf16", formats) for formats in FORMATS), ("fp16", FORMATS[2]), ("fp16", FORMATS[3]), ("fp8", FORMATS[4])],
)
def test_formats_are_real_and_train_alike(mode: str, formats: tuple[str, ...], fp32_losses) -> None:
    (record,) = run_on_ranks(1, run_small, formats_config(mode, formats), NUM_STEPS, state_formats)
    main_params, main_grads, exp_avg, exp_avg_sq = formats
    assert record.probe["kinds"] == {
        "main_grads": {main_grads},
        "master_param": {main_params},
        "exp_avg": {exp_avg},
        "exp_avg_sq": {exp_avg_sq},
    }
    assert record.probe["bytes"] == BYTES[main_params] + BYTES[exp_avg] + BYTES[exp_avg_sq]
    assert [step.loss for step in record.steps] == pytest.approx(fp32_losses[mode], abs=3e-3)
    # They are other formats: ten steps do not come out the same.
    assert [step.loss for step in record.steps][2:] != fp32_losses[mode][2:]


def test_layouts_agree() -> None:
    """Shards cut parameters, and with them what shares a scale, elsewhere."""
    formats = ("fp16", "bf16", "fp8", "fp16")
    (one,) = run_on_ranks(1, run_small, formats_config("bf16", formats), 5)
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    for record in run_on_ranks(4, run_small, formats_config("bf16", formats, layout), 5):
        assert [s.loss for s in record.steps] == pytest.approx([s.loss for s in one.steps], abs=3e-3)


def lonely_parameter(gradient: float, repaired: bool) -> tuple[bool, list[float], list[float]]:
    """Three steps of one parameter with a constant gradient and FP8 moments."""
    import torch
    from transformer_engine.pytorch.optimizers import FusedAdam

    from megatron_fp8.optim.optimizer import survive_zero_moments

    parameter = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16, device="cuda"))
    optimizer = FusedAdam(
        [parameter],
        lr=2.0**-6,
        master_weights=True,
        exp_avg_dtype=torch.uint8,
        exp_avg_sq_dtype=torch.uint8,
        use_decoupled_grad=True,
    )
    if repaired:
        survive_zero_moments(optimizer)
    for _ in range(3):
        parameter.decoupled_grad = torch.full((64,), gradient, device="cuda")
        optimizer.step()
    first = optimizer.state[parameter]["exp_avg"].dequantize()
    return bool(parameter.isfinite().all()), parameter.tolist(), first.tolist()


def test_moments_of_zero_stay_zero_in_fp8() -> None:
    """Without the repair they are NaN, and so is the weight a step later; when this fails, TE has fixed it."""
    (broken,) = run_on_ranks(1, lonely_parameter, 0.0, False)
    assert not broken[0]
    (whole,) = run_on_ranks(1, lonely_parameter, 0.0, True)
    assert whole == (True, [1.0] * 64, [0.0] * 64)


def test_moments_too_small_to_scale_are_zero() -> None:
    (whole,) = run_on_ranks(1, lonely_parameter, 1e-38, True)
    assert whole == (True, [1.0] * 64, [0.0] * 64)


def test_the_repair_leaves_other_moments_alone() -> None:
    plain, repaired = (run_on_ranks(1, lonely_parameter, 0.3, fix)[0] for fix in (False, True))
    assert plain == repaired
    assert plain[2][0] == pytest.approx(0.3 * (1 - 0.9**3), rel=2**-3)


def padded_rows(parts) -> tuple[int, bool]:
    """A shard that holds padding of the vocabulary alone: its moments are 0 from the first step on."""
    import torch

    finite = all(bool(torch.isfinite(p).all()) for p in parameters(parts))
    moments = [state["exp_avg"].dequantize() for state in parts.optimizer.optimizer.state.values()]
    return sum(bool((moment == 0).all()) for moment in moments), finite


def test_ranks_that_hold_padding_only_do_not_break_the_run() -> None:
    config = formats_config("bf16", ("fp32", "fp32", "fp8", "fp8"))
    # 250 entries become 4096: of two ranks' shards one is rows of padding only.
    model = config.model.model_copy(
        update={"make_vocab_size_divisible_by": 4096, "untie_embeddings_and_output_weights": False}
    )
    config = config.model_copy(update={"model": model})
    records = run_on_ranks(2, run_small, config, 4, padded_rows)
    assert sum(record.probe[0] for record in records) >= 1
    assert all(record.probe[1] for record in records)
    assert all(step.loss < records[0].steps[0].loss + 1e-6 for record in records for step in record.steps)
