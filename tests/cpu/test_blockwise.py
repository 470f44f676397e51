"""Block-scaled FP8 (1 x 128, 128 x 128) and MXFP8 on the stand-in, against loops over blocks written apart from it."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron_fp8.cpu import install

install()

import transformer_engine.pytorch as te_pytorch  # noqa: E402
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.common.recipe import Float8BlockScaling  # noqa: E402
from transformer_engine.pytorch import tensor as te  # noqa: E402
from transformer_engine.pytorch.cpp_extensions import general_gemm  # noqa: E402

from megatron_fp8.cpu.kernels.quantize import format_of  # noqa: E402
from tests.cpu.fp8_reference import on_gpu  # noqa: E402

E4M3, E5M2 = tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2
LIMIT = {E4M3: 448.0, E5M2: 57344.0}
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
# Whole blocks, and edges that no block fits.
SHAPES = [(128, 256), (2, 64, 128), (130, 200)]


def sample(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(5)
    # Magnitudes differ from block to block.
    return (torch.randn(*shape, generator=generator) * torch.logspace(-4, 4, shape[-1])).to(dtype)


def blockwise(fp8: Any = E4M3, dim: int = 1, **options: Any) -> Any:
    return te.Float8BlockQuantizer(fp8, **({"rowwise": True, "columnwise": True} | options), block_scaling_dim=dim)


def mxfp8(fp8: Any = E4M3, **options: Any) -> Any:
    return te.MXFP8Quantizer(fp8, **options)


def power_of_two_above(x: np.float32) -> float:
    return 2.0 ** math.ceil(math.log2(x)) if x > 0 else 1.0


def reference(x: torch.Tensor, tile: tuple[int, int], fp8: Any, scale_of: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers `[m, k]` in float64 and inverse scales by tile, one tile after the other."""
    matrix = x.float().reshape(-1, x.shape[-1]).cpu().numpy()
    tiles = [math.ceil(size / length) for size, length in zip(matrix.shape, tile, strict=True)]
    numbers, inverse = np.zeros(matrix.shape), np.zeros(tiles, dtype=np.float32)
    for i in range(tiles[0]):
        for j in range(tiles[1]):
            place = slice(i * tile[0], (i + 1) * tile[0]), slice(j * tile[1], (j + 1) * tile[1])
            scale = np.float32(scale_of(np.abs(matrix[place]).max()))
            bytes_ = np.clip(matrix[place] * scale, -LIMIT[fp8], LIMIT[fp8]).astype(NUMPY[fp8])
            inverse[i, j] = np.float32(1) / scale
            numbers[place] = bytes_.astype(np.float64) * inverse[i, j]
    return torch.from_numpy(numbers).cuda(), torch.from_numpy(inverse).cuda()


def assert_values(storage: Any, columnwise: bool, expected: torch.Tensor) -> None:
    """The numbers that the GEMM reads."""
    values, factor = format_of(storage).values(storage, columnwise)
    torch.testing.assert_close(values.reshape(expected.shape).double() * factor, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pow_2", [True, False])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("dim", [1, 2])
def test_blockwise_values_scales_and_layouts(dim: int, fp8: Any, pow_2: bool, shape: tuple[int, ...]) -> None:
    def scale_of(amax: np.float32) -> float:
        scale = np.float32(LIMIT[fp8]) / amax
        return 2.0 ** math.floor(math.log2(scale)) if pow_2 else scale

    x, quantizer = sample(*shape), blockwise(fp8, dim, force_pow_2_scales=pow_2)
    result = tex.quantize(x, quantizer)
    assert (result.shape, result.dtype) == (x.shape, x.dtype)
    rows, columns = (128, 128) if dim == 2 else (1, 128), (128, 128) if dim == 2 else (128, 1)
    numbers, inverse = reference(x, rows, fp8, scale_of)
    inverse = inverse if dim == 2 else inverse.t()
    assert result._rowwise_scale_inv.shape == quantizer.get_scale_shape(shape, False)
    assert torch.equal(result._rowwise_scale_inv[: inverse.shape[0], : inverse.shape[1]], inverse)
    assert result._rowwise_scale_inv.count_nonzero() == inverse.numel()
    assert_values(result, False, numbers)
    # TE's own dequantization reads the layout that it documents.
    torch.testing.assert_close(result.dequantize(dtype=torch.float32).reshape(numbers.shape).double(), numbers)

    numbers, inverse = reference(x, columns, fp8, scale_of)
    inverse = inverse.t() if dim == 2 else inverse
    assert result._columnwise_data.is_contiguous()
    assert result._columnwise_data.shape == (shape[-1], *shape[:-1])
    assert torch.equal(result._columnwise_scale_inv[: inverse.shape[0], : inverse.shape[1]], inverse)
    assert_values(result, True, numbers)
    result.update_usage(rowwise_usage=False)
    torch.testing.assert_close(result.dequantize(dtype=torch.float32).reshape(numbers.shape).double(), numbers)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_mxfp8_values_scales_and_layouts(fp8: Any, square: bool) -> None:
    def scale_of(amax: np.float32) -> float:
        return 1 / power_of_two_above(amax * np.float32(1 / LIMIT[fp8]))

    x, quantizer = sample(2, 32, 96), mxfp8(fp8, with_2d_quantization=square)
    result = tex.quantize(x, quantizer)
    for columnwise in (False, True):
        tile = (32, 32) if square else (32, 1) if columnwise else (1, 32)
        numbers, inverse = reference(x, tile, fp8, scale_of)
        scales = result._columnwise_scale_inv if columnwise else result._rowwise_scale_inv
        assert scales.shape == quantizer.get_scale_shape(x.shape, columnwise)
        inverse = inverse.repeat_interleave(32, dim=1 if columnwise else 0) if square else inverse
        stored = 2.0 ** (scales.double() - 127)
        assert torch.equal(stored[: inverse.shape[0], : inverse.shape[1]], inverse.double())
        assert_values(result, columnwise, numbers)
        if not columnwise:
            assert torch.equal(tex.dequantize(result, tex.DType.kFloat32).reshape(numbers.shape).double(), numbers)


def test_degenerate_blocks() -> None:
    x = torch.zeros(32, 128)
    x[1, 3], x[2, 0], x[3, 5], x[4, 0], x[5, :2] = 1e-40, math.inf, math.nan, 448.0, torch.tensor([math.nan, 7.0])
    block = tex.quantize(x, blockwise(columnwise=False))
    largest = 2.0**-127
    assert block._rowwise_scale_inv[0, :6].tolist() == [1.0, largest, 1.0, 1.0, 1.0, 1 / 64]
    values = block.dequantize(dtype=torch.float32)
    assert values[2, 0] == 448.0
    assert values.isnan().nonzero().tolist() == [[3, 5], [5, 0]]
    mx = tex.quantize(x, mxfp8(columnwise=False))
    assert mx._rowwise_scale_inv[:6, 0].tolist() == [0, 0, 254, 0, 127, 121]
    assert tex.dequantize(mx, tex.DType.kFloat32)[4, 0] == 448.0


@pytest.mark.parametrize("make", [blockwise, mxfp8])
@pytest.mark.parametrize("internal", [False, True])
def test_outputs_take_the_usages_and_noop_leaves_them(make: Any, internal: bool) -> None:
    x, quantizer = sample(128, 128), make(columnwise=False)
    quantizer.internal = internal
    output = tex.quantize(x, quantizer)
    assert isinstance(output, torch.Tensor) is not internal
    assert output._columnwise_data is None
    data = output._rowwise_data
    before = data.clone()
    tex.quantize(-x, quantizer, output, torch.ones(1))
    assert torch.equal(data, before)
    tex.quantize(-x, make(), output)
    assert output._rowwise_data is data
    assert torch.equal(data, before ^ 0x80)
    fresh = tex.quantize(-x, make())
    assert torch.equal(output._columnwise_data, fresh._columnwise_data)
    assert torch.equal(output._columnwise_scale_inv, fresh._columnwise_scale_inv)
    assert tex.quantize(torch.empty(0, 128), make()).shape == (0, 128)


@pytest.mark.parametrize("shape", [(2, 8, 32), (32, 48)])
def test_mxfp8_refuses_what_its_blocks_do_not_divide(shape: tuple[int, ...]) -> None:
    with pytest.raises(RuntimeError, match="divisible by 32"):
        tex.quantize(torch.ones(shape), mxfp8())


M, N, K = 96, 32, 128
# Shapes and usages of A and B by layout, as a GPU reads them.
LAYOUTS = {
    "TN": (((N, K), "rowwise"), ((M, K), "rowwise")),
    "NN": (((K, N), "columnwise"), ((M, K), "rowwise")),
    "NT": (((K, N), "columnwise"), ((K, M), "columnwise")),
}


def only(usage: str) -> dict[str, bool]:
    return {"rowwise": usage == "rowwise", "columnwise": usage == "columnwise"}


@pytest.mark.parametrize("dims", [(1, 1), (2, 1), (1, 2), None], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gemms_read_the_usage_along_the_summed_axis(layout: str, dims: tuple[int, int] | None) -> None:
    def make(i: int, usage: str) -> Any:
        return mxfp8(**only(usage)) if dims is None else blockwise(dim=dims[i], **only(usage))

    a, b = (tex.quantize(sample(*shape), make(i, usage)) for i, (shape, usage) in enumerate(LAYOUTS[layout]))
    numbers = [x.dequantize(dtype=torch.float32).double() for x in (b, a)]
    left, right = numbers[0].t() if layout[1] == "T" else numbers[0], numbers[1].t() if layout[0] == "T" else numbers[1]
    result = general_gemm(a, b, out_dtype=torch.float32, layout=layout, use_split_accumulator=True)[0]
    expected = left @ right
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
    for side, name in enumerate("AB"):
        operands = [a, b]
        shape, usage = LAYOUTS[layout][side]
        other = "columnwise" if usage == "rowwise" else "rowwise"
        operands[side] = tex.quantize(sample(*shape), make(side, other))
        with pytest.raises(RuntimeError, match=f"Input {name} is missing {usage[:-4]}-wise usage"):
            general_gemm(*operands, out_dtype=torch.float32, layout=layout, use_split_accumulator=True)


EPILOGUE = "Epilogue requested outside"
# Block dimensions of A and B, shape of A `[columns, k]`, of B `[rows, k]`, options, and the error's words.
REFUSED: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int], dict[str, Any], str]] = {
    "2D x 2D": ((2, 2), (N, K), (M, K), {}, "but got 2D by 2D"),
    "k": ((2, 1), (N, 120), (M, 120), {}, "Leading dimension requirement on A"),
    "columns": ((2, 1), (12, K), (M, K), {"out_dtype": torch.float32}, "Outer dimension requirement on A"),
    "columns to BF16": ((2, 1), (12, K), (M, K), {}, "outer dimension requirement on A"),
    "rows of 1D": ((2, 1), (N, K), (44, K), {}, "Outer dimension requirement on B"),
    "GELU": ((2, 1), (N, K), (M, K), {"gelu": True}, EPILOGUE),
    "GELU and bias": ((2, 1), (N, K), (M, K), {"gelu": True, "bias": torch.zeros(N).bfloat16()}, EPILOGUE),
    "GELU gradient in FP32": (
        *((2, 1), (N, K), (M, K)),
        *({"gelu": True, "grad": True, "gelu_in": torch.zeros(M, N), "out_dtype": torch.float32}, "unsupported value"),
    ),
    "bias gradient": ((2, 1), (N, K), (M, K), {"bias": torch.zeros(N), "grad": True}, EPILOGUE),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_block_scaled_gemm_refuses(case: str) -> None:
    dims, shape_a, shape_b, options, words = REFUSED[case]
    a, b = (
        tex.quantize(sample(*shape), blockwise(dim=dim)) for shape, dim in zip((shape_a, shape_b), dims, strict=True)
    )
    with pytest.raises(RuntimeError, match=words):
        general_gemm(a, b, **{"out_dtype": torch.bfloat16, "use_split_accumulator": True, **on_gpu(options)})


def test_block_scaled_gemms_need_the_split_accumulator() -> None:
    """TE's Python asks for it where a module does not."""
    a, b = (tex.quantize(sample(*shape), blockwise()) for shape in ((N, K), (M, K)))
    arguments: Any = (a, True, b, False, None, None, tex.DType.kBFloat16, None, tex.DType.kBFloat16, False, None, False)
    assert tex.generic_gemm(*arguments, torch.empty(1), 1, False, True)[0].shape == (M, N)
    with pytest.raises(RuntimeError, match="needs the split accumulator"):
        tex.generic_gemm(*arguments, torch.empty(1), 1, False, False)


def test_block_scaled_gemms_that_look_like_refused_ones_work() -> None:
    """Any number of rows of B with 2D blocks, and GELU's gradient in BF16."""
    a, b = tex.quantize(sample(N, K), blockwise()), tex.quantize(sample(45, K), blockwise(dim=2))
    options = {"out_dtype": torch.bfloat16, "use_split_accumulator": True}
    assert general_gemm(a, b, **options)[0].shape == (45, N)
    assert general_gemm(a, b, gelu=True, grad=True, gelu_in=torch.zeros(45, N), **options)[0].shape == (45, N)


@pytest.mark.parametrize("make", [blockwise, mxfp8])
def test_e5m2_x_e5m2_and_mixed_scalings_are_refused(make: Any) -> None:
    e5m2, other = make(E5M2), mxfp8() if make is blockwise else blockwise()
    a, b = tex.quantize(sample(N, K), e5m2), tex.quantize(sample(64, K), e5m2)
    with pytest.raises(RuntimeError, match="no FP8 GEMM of E5M2 x E5M2"):
        general_gemm(a, b, out_dtype=torch.bfloat16, use_split_accumulator=True)
    for mixed in (tex.quantize(sample(64, K), other), sample(64, K)):
        with pytest.raises(RuntimeError, match="compatible scaling modes"):
            general_gemm(a, mixed, out_dtype=torch.bfloat16, use_split_accumulator=True)


@pytest.mark.parametrize("dim", [1, 2])
def test_a_tensor_without_axes_is_quantized_as_one_element(dim: int) -> None:
    for usages in ({}, {"rowwise": False}, {"columnwise": False}):
        result = tex.quantize(torch.tensor(0.75), blockwise(dim=dim, **usages))
        assert tex.dequantize(result, tex.DType.kFloat32).item() == 0.75


def test_first_axes_are_swapped() -> None:
    x = torch.arange(24).reshape(2, 3, 4)
    assert torch.equal(tex.swap_first_dims(x, out=None), x.transpose(0, 1))
    out = torch.empty(3, 2, 4, dtype=x.dtype)
    tex.swap_first_dims(x, out=out)
    assert torch.equal(out, x.transpose(0, 1))


def test_linear_with_block_scaling_follows_float64() -> None:
    torch.manual_seed(3)
    module = te_pytorch.Linear(256, 128, params_dtype=torch.bfloat16, device="cuda", fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.zeros(128, 256)
    x, grad = torch.randn(2, 64, 256).bfloat16().requires_grad_(), torch.randn(2, 64, 128).bfloat16()
    with te_pytorch.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling()):
        y = module(x)
    y.backward(grad)

    def numbers(value: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
        scale_of = lambda amax: 2.0 ** math.floor(math.log2(np.float32(448) / amax))  # noqa: E731
        return reference(value.detach(), tile, E4M3, scale_of)[0]

    row, column = (1, 128), (128, 1)
    weight = numbers(module.weight, (128, 128))
    expected = {
        "y": (y, numbers(x, row) @ weight.t() + module.bias.detach().double()),
        "dgrad": (x.grad, numbers(grad, row) @ weight),
        "wgrad": (module.weight.main_grad, numbers(grad, column).t() @ numbers(x, column)),
    }
    for name, (actual, wanted) in expected.items():
        error = (actual.detach().double().reshape(wanted.shape) - wanted).abs()
        bound = (2.0**-8 if actual.dtype == torch.bfloat16 else 1e-6) * wanted.abs() + 2e-6 * wanted.abs().max()
        assert bool((error <= bound).all()), name
