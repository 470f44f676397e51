"""Quantization with TE's per-tensor quantizers on the stand-in: values, scales, amaxes, usages, storage."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron_fp8.cpu import install

install()

import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.pytorch import tensor as te  # noqa: E402

from tests.ranks import run_on_ranks  # noqa: E402

E4M3, E5M2 = tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2
LIMIT = {E4M3: 448.0, E5M2: 57344.0}
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
FP32_MAX = torch.finfo(torch.float32).max


def delayed(scale: float = 1.0, amax: float = 0.0, dtype: Any = E4M3, **usages: bool) -> Any:
    return te.Float8Quantizer(torch.tensor([scale]), torch.tensor([amax]), dtype, **usages)


def current(dtype: Any = E4M3, **options: Any) -> Any:
    return te.Float8CurrentScalingQuantizer(dtype, torch.device("cuda"), **options)


def sample(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(11)).to(dtype)


def expected_bytes(x: torch.Tensor, scale: float, dtype: Any) -> torch.Tensor:
    scaled = np.clip(x.float().cpu().numpy() * np.float32(scale), -LIMIT[dtype], LIMIT[dtype])
    return torch.from_numpy(scaled.astype(NUMPY[dtype]).view(np.uint8)).cuda()


@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_delayed_scaling_uses_the_scale_that_stands_and_records_the_running_maximum(dtype: Any, fp8: Any) -> None:
    quantizer, x = delayed(scale=100.0, amax=0.5, dtype=fp8), sample(6, 4, 16, dtype=dtype)
    result = tex.quantize(x, quantizer)
    assert isinstance(result, te.Float8Tensor)
    assert (result.shape, result.dtype) == (x.shape, dtype)
    assert torch.equal(result._data, expected_bytes(x, 100.0, fp8))
    assert result._scale_inv.item() == np.float32(1) / np.float32(100)
    assert quantizer.amax.item() == x.float().abs().max().item()
    assert quantizer.scale.item() == 100.0


def test_micro_batches_leave_the_largest_amax() -> None:
    quantizer = delayed()
    for amax in (3.0, 9.0, 2.0):
        tex.quantize(torch.tensor([-amax, 1.0]), quantizer)
    assert quantizer.amax.item() == 9.0


def test_recorded_amax_is_a_view_of_the_history() -> None:
    history = torch.zeros(4, 2)
    quantizer = te.Float8Quantizer(torch.ones(1), history[0][1:2], E4M3)
    tex.quantize(torch.tensor([5.0]), quantizer)
    assert history[0].tolist() == [0.0, 5.0]


def test_nan_shows_in_the_bytes_and_not_in_the_amax_and_infinity_in_both() -> None:
    quantizer = delayed()
    x = torch.tensor([1.0, math.nan, 2.0])
    assert tex.quantize(x, quantizer).dequantize().isnan().tolist() == [False, True, False]
    assert quantizer.amax.item() == 2.0
    assert tex.quantize(torch.tensor([1.0, -math.inf]), quantizer).dequantize().tolist() == [1.0, -448.0]
    assert quantizer.amax.item() == math.inf


@pytest.mark.parametrize(
    ("peak", "options", "scale"),
    [
        (3.5, {}, 128.0),
        (3.0, {}, 448.0 / 3.0),
        (3.0, {"force_pow_2_scales": True}, 128.0),
        (0.25, {"amax_epsilon": 1.0}, 448.0),
        (0.0, {}, 1.0),
        (math.inf, {}, 1.0),
        (1e-40, {}, FP32_MAX),
    ],
)
def test_current_scaling_takes_the_scale_from_the_tensor(peak: float, options: dict[str, Any], scale: float) -> None:
    result = tex.quantize(torch.tensor([peak, -peak / 2]), current(**options))
    assert result._scale_inv.item() == np.float32(1) / np.float32(scale)


def test_current_scaling_passes_over_nan() -> None:
    result = tex.quantize(torch.tensor([3.5, math.nan]), current())
    assert result._scale_inv.item() == 1 / 128
    assert result.dequantize().isnan().tolist() == [False, True]


@pytest.mark.parametrize("make", [delayed, current])
@pytest.mark.parametrize("shape", [(8, 16), (2, 3, 16), (16,), (0, 16), (2, 0, 16)])
def test_both_usages_are_one_storage(make: Any, shape: tuple[int, ...]) -> None:
    x = sample(*shape)
    result = tex.quantize(x, make())
    assert result._transpose.shape == (shape[-1], *shape[:-1])
    assert not result._transpose_invalid
    assert result._transpose.untyped_storage().data_ptr() == result._data.untyped_storage().data_ptr()
    result._data.add_(1)
    assert torch.equal(result._transpose, result._data.movedim(-1, 0) if len(shape) > 1 else result._data)


@pytest.mark.parametrize("make", [delayed, current])
@pytest.mark.parametrize("internal", [False, True])
def test_columnwise_usage_alone_keeps_the_values(make: Any, internal: bool) -> None:
    x, both = sample(4, 6, 16), tex.quantize(sample(4, 6, 16), make())
    quantizer = make(rowwise=False)
    quantizer.internal = internal
    result = tex.quantize(x, quantizer)
    assert isinstance(result, te.Float8TensorStorage)
    assert isinstance(result, torch.Tensor) is not internal
    assert result._data is None
    assert torch.equal(result._transpose, both._transpose)
    assert torch.equal(tex.dequantize(result, tex.DType.kBFloat16), both.dequantize())
    assert tuple(result.size()) == x.shape


def test_output_is_written_in_place_and_takes_the_quantizers_usages() -> None:
    output = tex.quantize(sample(8, 16), delayed(columnwise=False))
    data = output._data
    assert output._transpose is None
    x = sample(8, 16) * 3
    assert tex.quantize(x, delayed(scale=2.0), output) is output
    assert output._data is data
    assert torch.equal(data, expected_bytes(x, 2.0, E4M3))
    assert torch.equal(output._transpose, data.t())
    assert output._scale_inv.item() == 0.5
    tex.quantize(x, delayed(scale=2.0, rowwise=False), output)
    assert output._data is None
    assert torch.equal(output._transpose, expected_bytes(x, 2.0, E4M3).t())


def test_a_slice_of_a_weight_is_quantized_in_place() -> None:
    weight = tex.quantize(torch.zeros(4, 16), delayed())
    # An empty amax, as TE's distributed-optimizer cast passes it, records nothing.
    quantizer = te.Float8Quantizer(torch.tensor([2.0]), torch.Tensor(), E4M3)
    quantizer.update_quantized(torch.ones(32), weight.reshape(-1)[16:48])
    assert weight._data.view(torch.float8_e4m3fn).float().flatten().tolist() == [0.0] * 16 + [2.0] * 32 + [0.0] * 16
    assert torch.equal(weight._transpose, weight._data.t())


@pytest.mark.parametrize("make", [delayed, current])
def test_noop_leaves_output_and_amax(make: Any) -> None:
    quantizer, x = make(), sample(8, 16)
    output = tex.quantize(x, quantizer)
    before = output._data.clone(), output._scale_inv.clone()
    recorded = getattr(quantizer, "amax", torch.ones(1)).clone()
    tex.quantize(x * 100, quantizer, output, torch.ones(1))
    assert torch.equal(output._data, before[0])
    assert torch.equal(output._scale_inv, before[1])
    assert torch.equal(getattr(quantizer, "amax", torch.ones(1)), recorded)
    tex.quantize(x * 100, quantizer, output, torch.zeros(1))
    assert not torch.equal(output._data, before[0]) or not torch.equal(output._scale_inv, before[1])


@pytest.mark.parametrize("make", [delayed, current])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantized_values_are_the_bytes_times_scale_inv_rounded_once(make: Any, fp8: Any, dtype: Any) -> None:
    result = tex.quantize(sample(8, 16), make(dtype=fp8))
    bytes_ = result._data.cpu().numpy().view(NUMPY[fp8]).astype(np.float32)
    expected = torch.from_numpy(bytes_ * result._scale_inv.cpu().numpy()).to(dtype).cuda()
    te_dtype = {torch.float32: "kFloat32", torch.bfloat16: "kBFloat16", torch.float16: "kFloat16"}[dtype]
    assert torch.equal(tex.dequantize(result, getattr(tex.DType, te_dtype)), expected)


def test_bias_gradient_and_splits() -> None:
    grad, quantizer = sample(4, 8, 16), delayed()
    bias_grad, quantized = tex.bgrad_quantize(grad, quantizer)
    assert torch.equal(bias_grad, grad.double().sum((0, 1)).to(torch.bfloat16))
    assert torch.equal(quantized._data, expected_bytes(grad, 1.0, E4M3))
    assert tex.bgrad_quantize(grad, None)[1] is grad
    quantizers = [delayed(scale=1.0), delayed(scale=2.0)]
    parts = tex.split_quantize(grad.reshape(-1, 16), [20, 12], quantizers)
    assert [tuple(part.shape) for part in parts] == [(20, 16), (12, 16)]
    assert torch.equal(parts[1]._data, expected_bytes(grad.reshape(-1, 16)[20:], 2.0, E4M3))


def test_updated_usages_of_a_tensor_need_no_second_copy() -> None:
    result = tex.quantize(sample(8, 16), delayed(columnwise=False))
    result.update_usage(columnwise_usage=True)
    assert torch.equal(result._transpose, result._data.t())
    before = result.dequantize()
    result.update_usage(rowwise_usage=False)
    assert torch.equal(tex.dequantize(result, tex.DType.kBFloat16), before)


def test_empty_tensors_have_the_quantizers_usages() -> None:
    for quantizer in (delayed(scale=4.0), current()):
        empty = quantizer.make_empty((4, 16), dtype=torch.bfloat16)
        assert (empty.shape, empty.dtype, empty._transpose.shape) == ((4, 16), torch.bfloat16, (16, 4))
        assert empty._scale_inv.item() == (0.25 if isinstance(quantizer, te.Float8Quantizer) else 1.0)


def test_saved_bytes_that_are_overwritten_before_backward_are_an_error() -> None:
    """A weight cache refreshed between forward and backward would give silently wrong gradients on a GPU."""
    weight = tex.quantize(sample(16, 16), delayed())
    x = torch.ones(16, 16, requires_grad=True)

    class Use(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(weight._transpose)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad + ctx.saved_tensors[0]

    y = Use.apply(x)
    tex.quantize(sample(16, 16), delayed(), weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def _scale_inv_of_a_rank() -> float:
    group, peak = torch.distributed.group.WORLD, 1.0 + 2.5 * torch.distributed.get_rank()
    quantizer = current(with_amax_reduction=True, amax_reduction_group=group)
    return tex.quantize(torch.tensor([peak, 0.5], device="cuda"), quantizer)._scale_inv.item()


def test_current_scaling_reduces_the_amax_over_its_group() -> None:
    assert run_on_ranks(2, _scale_inv_of_a_rank) == [1 / 128, 1 / 128]


def test_other_quantizers_are_named() -> None:
    with pytest.raises(NotImplementedError, match=r"NVFP4Quantizer has no CPU stand-in"):
        tex.quantize(sample(16, 16), te.NVFP4Quantizer.__new__(te.NVFP4Quantizer))
