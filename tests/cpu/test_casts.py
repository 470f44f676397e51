"""The stand-in's float8 casts against ml_dtypes, on every bit pattern of the 16-bit formats and of float8."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.cpu.kernels.casts import FP8_MAX, decode_fp8, encode_fp8, tensor_amax

FORMATS = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}
# Powers of two, ordinary scales, and those that push every number into saturation or underflow.
SCALES = [1.0, 2.0**-7, 2.0**9, 37.3, 448 / 3.1, 1e-3, 57344 / 0.77, 1.1e-38, 3.0e38]

formats = pytest.mark.parametrize("fp8", FORMATS, ids=["e4m3", "e5m2"])


def encode(x: torch.Tensor, scale: float, fp8: torch.dtype) -> np.ndarray:
    data = torch.empty(x.shape, dtype=torch.uint8)
    encode_fp8(x, torch.tensor([scale]), fp8, out=data)
    return data.numpy()


def reference(x: torch.Tensor, scale: float, fp8: torch.dtype) -> np.ndarray:
    with np.errstate(all="ignore"):
        scaled = x.float().numpy() * np.float32(scale)
        return np.clip(scaled, -FP8_MAX[fp8], FP8_MAX[fp8]).astype(FORMATS[fp8])


def assert_same(data: np.ndarray, expected: np.ndarray) -> None:
    """Equal bytes (so equal signs of zeros too), and NaN, of either sign, in the same places."""
    actual = data.view(expected.dtype)
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), nan)
    np.testing.assert_array_equal(data[~nan], expected.view(np.uint8)[~nan])


@formats
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_encoded_as_by_ml_dtypes(dtype: torch.dtype, scale: float, fp8: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_same(encode(x, scale, fp8), reference(x, scale, fp8))


@formats
@settings(max_examples=60, deadline=None)
@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64), scale=st.floats(2.0**-120, 2.0**120, width=32)
)
def test_fp32_numbers_are_encoded_as_by_ml_dtypes(bits: list[int], scale: float, fp8: torch.dtype) -> None:
    x = torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))
    assert_same(encode(x, scale, fp8), reference(x, scale, fp8))


@formats
def test_ties_go_to_the_even_neighbour(fp8: torch.dtype) -> None:
    values = np.arange(256, dtype=np.uint8).view(FORMATS[fp8]).astype(np.float32)
    values = np.sort(values[np.isfinite(values)])
    ties = torch.from_numpy((values[1:] + values[:-1]) / 2)
    assert_same(encode(ties, 1.0, fp8), reference(ties, 1.0, fp8))
    above = torch.nextafter(ties, torch.tensor(math.inf))
    assert_same(encode(above, 1.0, fp8), reference(above, 1.0, fp8))


@formats
def test_numbers_of_several_blocks(fp8: torch.dtype) -> None:
    x = torch.randn(3, 2**18 + 5, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert_same(encode(x, 500.0, fp8), reference(x, 500.0, fp8))


@formats
def test_a_bound_spares_the_clamp_only_where_nothing_saturates(fp8: torch.dtype) -> None:
    for scale in (0.1, 1.0, 3.0, 7.77):
        edge = np.float32(FP8_MAX[fp8] / scale)
        for peak in (np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(np.inf)), edge * 2):
            x = torch.tensor([float(peak), -float(peak), float("nan"), 1e-3])
            data = torch.empty(4, dtype=torch.uint8)
            encode_fp8(x, torch.tensor([scale]), fp8, out=data, bound=float(peak))
            assert_same(data.numpy(), reference(x, scale, fp8))


@formats
@pytest.mark.parametrize("with_nan", [True, False])
def test_every_byte_is_decoded_as_by_ml_dtypes(with_nan: bool, fp8: torch.dtype) -> None:
    data = torch.arange(256, dtype=torch.uint8)
    expected = torch.from_numpy(data.numpy().view(FORMATS[fp8]).astype(np.float32))
    if not with_nan:
        data, expected = data[~expected.isnan()], expected[~expected.isnan()]
    values, factor = decode_fp8(data, fp8)
    torch.testing.assert_close(values * factor, expected, rtol=0, atol=0, equal_nan=True)
    assert math.log2(factor).is_integer()


@formats
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_single_nan_byte_of_either_sign_is_decoded_as_nan(byte: int, fp8: torch.dtype) -> None:
    data = torch.full((1000,), 0x31, dtype=torch.uint8)
    data[417] = byte
    values, _ = decode_fp8(data, fp8)
    assert values.isnan().nonzero().tolist() == [[417]]


@formats
def test_strided_bytes_are_written_and_read_in_logical_order(fp8: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 35).reshape(5, 7)
    data = torch.zeros(7, 5, dtype=torch.uint8).t()
    encode_fp8(x, torch.ones(1), fp8, out=data)
    assert_same(data.contiguous().numpy(), reference(x, 1.0, fp8))
    values, factor = decode_fp8(data, fp8)
    np.testing.assert_array_equal(values.numpy() * factor, reference(x, 1.0, fp8).astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax_passes_over_nan_and_keeps_infinity(dtype: torch.dtype) -> None:
    def of(*values: float) -> float:
        result = tensor_amax(torch.tensor(values, dtype=dtype))
        assert result.dtype == torch.float32
        assert result.shape == ()
        return result.item()

    assert of() == 0.0
    assert of(-0.0) == 0.0
    assert of(1.0, -3.5, 2.0) == 3.5
    assert of(1.0, math.nan, -2.0) == 2.0
    assert of(math.nan) == 0.0
    assert of(-math.inf, 1.0, math.nan) == math.inf
