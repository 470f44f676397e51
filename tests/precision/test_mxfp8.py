"""MXFP8 in the real modules and in this project's model; the reference rounds with ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.ranks import run_on_ranks
from tests.small_run import run_small, small_config

BLOCK, LARGEST = 32, np.float32(448)


def rounded(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Float64 numbers of a matrix after MXFP8 with blocks of 32 along `axis`: E4M3 elements and E8M0 scales.

    The scale is the smallest power of two with which the block's largest element fits (TE; the OCP specification
    rounds it down, and lets that element saturate).
    """
    matrix = x.detach().float().cpu().numpy()
    matrix = matrix if axis == 1 else matrix.T
    blocks = matrix.reshape(matrix.shape[0], -1, BLOCK)
    needed = np.abs(blocks).max(axis=2, keepdims=True) * (np.float32(1) / LARGEST)
    exponents = needed.astype(ml_dtypes.float8_e8m0fnu)
    too_small = exponents.astype(np.float32) < needed
    exponents = (exponents.view(np.uint8) + too_small.astype(np.uint8)).view(ml_dtypes.float8_e8m0fnu)
    scales = exponents.astype(np.float64)
    values = (blocks / scales).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales
    values = values.reshape(matrix.shape)
    return torch.from_numpy(values if axis == 1 else np.ascontiguousarray(values.T))


def linear_results() -> dict[str, torch.Tensor]:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import MXFP8BlockScaling

    torch.manual_seed(3)
    linear = te.Linear(64, 96, bias=False, params_dtype=torch.bfloat16, device="cuda", fuse_wgrad_accumulation=True)
    linear.weight.main_grad = torch.zeros(96, 64, device="cuda")
    # Magnitudes differ from block to block, in both directions.
    spread = torch.logspace(-3, 3, 64)
    x = (torch.randn(4, 32, 64) * spread * torch.logspace(-2, 2, 4)[:, None, None]).bfloat16().cuda().requires_grad_()
    grad = torch.randn(4, 32, 96).bfloat16().cuda()
    with te.autocast(enabled=True, recipe=MXFP8BlockScaling()):
        y = linear(x)
    y.backward(grad)
    results = {
        "x": x.detach().reshape(-1, 64),
        "weight": linear.weight.detach(),
        "grad": grad.reshape(-1, 96),
        "fprop": y.detach().reshape(-1, 96),
        "dgrad": x.grad.reshape(-1, 64),
        "wgrad": linear.weight.main_grad,
    }
    return {name: tensor.cpu() for name, tensor in results.items()}


def test_the_three_gemms_multiply_the_operands_that_ml_dtypes_rounds() -> None:
    (results,) = run_on_ranks(1, linear_results)
    x, weight, grad = results["x"], results["weight"], results["grad"]
    expected = {
        "fprop": rounded(x, 1) @ rounded(weight, 1).t(),
        "dgrad": rounded(grad, 1) @ rounded(weight, 0),
        "wgrad": rounded(grad, 0).t() @ rounded(x, 0),
    }
    for gemm, wanted in expected.items():
        error = (results[gemm].double() - wanted).abs()
        size = {"fprop": x, "dgrad": grad, "wgrad": grad.t()}[gemm].double().abs() @ {
            "fprop": weight.t(),
            "dgrad": weight,
            "wgrad": x,
        }[gemm].double().abs()
        output_rounding = 2.0**-8 if results[gemm].dtype == torch.bfloat16 else 0.0
        assert bool((error <= output_rounding * wanted.abs() + 1e-6 * size).all()), gemm


def losses(mode: str, tp: int = 1, pp: int = 1) -> list[float]:
    precision = {"mode": mode, "fp8_recipe": "mxfp8"}
    parallel = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "sequence_parallel": tp > 1,
    }
    training = {"global_batch_size": 8}
    config = small_config(precision=precision, parallel=parallel, model={"seq_length": 64}, training=training)
    return [step.loss for step in run_small(config, 5).steps]


@pytest.fixture(scope="module")
def one_rank() -> list[float]:
    return run_on_ranks(1, losses, "fp8")[0]


def test_training_follows_bf16(one_rank: list[float]) -> None:
    (bf16,) = run_on_ranks(1, losses, "bf16")
    assert one_rank[-1] < one_rank[0] - 0.3
    assert one_rank == pytest.approx(bf16, rel=2e-3)
    assert one_rank != bf16


# On four ranks test_modes.py compares MXFP8 too, less closely.
@pytest.mark.parametrize(("tp", "pp", "world_size"), [pytest.param(2, 1, 4, marks=pytest.mark.slow), (1, 2, 2)])
def test_layouts_agree(tp: int, pp: int, world_size: int, one_rank: list[float]) -> None:
    ranks = run_on_ranks(world_size, losses, "fp8", tp, pp)
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0] == pytest.approx(one_rank, rel=2e-4)


def refusal() -> str:
    """What a device that Transformer Engine finds too old for MXFP8 answers."""
    from transformer_engine.pytorch import quantization

    from megatron_fp8.config.problem import ConfigError

    quantization._MXFP8_SUPPORT = (False, "Device compute capability 10.0 or higher required for MXFP8 execution.")
    try:
        run_small(small_config(precision={"mode": "fp8", "fp8_recipe": "mxfp8"}), 1)
    except ConfigError as error:
        return str(error)
    return "no ConfigError"


def test_a_device_without_mxfp8_is_refused_before_training() -> None:
    (text,) = run_on_ranks(1, refusal)
    assert "precision.fp8_recipe = mxfp8" in text
    assert "compute capability 9.0" in text
    assert "10.0 or higher" in text
    assert "precision.fp8_recipe=blockwise" in text
