"""Float8 casts against `ml_dtypes`, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_fp8.cpu.kernels.casts import amax, decode_fp8, encode_fp8
from tests.cpu import fp8_reference

FORMATS = list(fp8_reference.FORMATS)
# Powers of two leave ties between FP8 numbers where they were; the others move them. The last two overflow FP32 and
# flush it to subnormal numbers.
SCALES = [1.0, 2.0**-5, 2.0**9, 3.7, 448 / 3, 1 / 3, 0.00123, 1e30, 1e-30]


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a 16-bit dtype, infinities and NaNs among them."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def encoded(x: torch.Tensor, scale: float, fp8: torch.dtype) -> np.ndarray:
    out = torch.empty(x.shape, dtype=torch.uint8)
    encode_fp8(x, torch.tensor([scale]), fp8, out=out)
    return out.numpy()


def decoded(data: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    numbers, factor = decode_fp8(data, fp8)
    assert numbers.dtype == torch.float32
    assert np.log2(factor) == int(np.log2(factor))
    return numbers.double() * factor


def assert_same_bytes(actual: np.ndarray, expected: np.ndarray, fp8: torch.dtype) -> None:
    """Equal bytes; of NaNs only that they are NaNs, as they have several bytes."""
    is_nan = np.isnan(fp8_reference.values(expected, fp8))
    np.testing.assert_array_equal(np.isnan(fp8_reference.values(actual, fp8)), is_nan)
    np.testing.assert_array_equal(actual[~is_nan], expected[~is_nan])


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_of_all_16_bit_numbers(dtype: torch.dtype, scale: float, fp8: torch.dtype) -> None:
    x = all_patterns(dtype)
    assert_same_bytes(encoded(x, scale, fp8), fp8_reference.quantized_bytes(x, scale, fp8), fp8)


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 3.7])
def test_casts_of_fp32_next_to_ties(scale: float, fp8: torch.dtype) -> None:
    numbers = fp8_reference.values(np.arange(256, dtype=np.uint8), fp8)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    ties = (((numbers[1:] + numbers[:-1]) / 2) / np.float64(scale)).astype(np.float32)
    around = [ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))]
    x = torch.from_numpy(np.concatenate(around))
    assert_same_bytes(encoded(x, scale, fp8), fp8_reference.quantized_bytes(x, scale, fp8), fp8)


def test_casts_saturate_and_keep_nan() -> None:
    x = torch.tensor([1e30, -1e30, torch.inf, -torch.inf, torch.nan, 449.0, 61440.0])
    for fp8, limit in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        numbers = fp8_reference.values(encoded(x, 1.0, fp8), fp8)
        np.testing.assert_array_equal(numbers[:4], [limit, -limit, limit, -limit])
        assert np.isnan(numbers[4])
        assert numbers[6] == limit
    assert fp8_reference.values(encoded(x, 1.0, torch.float8_e4m3fn), torch.float8_e4m3fn)[5] == 448


@pytest.mark.parametrize("fp8", FORMATS)
def test_back_casts_of_all_bytes(fp8: torch.dtype) -> None:
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = fp8_reference.values(data.numpy(), fp8)
    np.testing.assert_array_equal(decoded(data, fp8).numpy(), expected)
    # Without a NaN the E4M3 bytes go another way; each NaN alone must be noticed.
    finite = torch.from_numpy(np.flatnonzero(~np.isnan(expected))).to(torch.uint8)
    np.testing.assert_array_equal(decoded(finite, fp8).numpy(), expected[~np.isnan(expected)])
    for byte in np.flatnonzero(np.isnan(expected)):
        numbers = decoded(torch.tensor([0, int(byte), 0x81], dtype=torch.uint8), fp8)
        assert torch.isnan(numbers).tolist() == [False, True, False]


@pytest.mark.parametrize("fp8", FORMATS)
def test_back_casts_of_strided_and_empty_bytes(fp8: torch.dtype) -> None:
    data = torch.arange(120, dtype=torch.uint8).view(10, 12)
    assert torch.equal(decoded(data.t(), fp8), decoded(data, fp8).t())
    assert decoded(torch.empty(0, 16, dtype=torch.uint8), fp8).shape == (0, 16)


def test_cast_into_strided_bytes() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    storage = torch.zeros(4, 6, dtype=torch.uint8)
    encode_fp8(x, torch.ones(1), torch.float8_e4m3fn, out=storage.t())
    assert_same_bytes(
        storage.t().contiguous().numpy(),
        fp8_reference.quantized_bytes(x, 1.0, torch.float8_e4m3fn),
        torch.float8_e4m3fn,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amax(dtype: torch.dtype) -> None:
    def of(*numbers: float) -> float:
        result = amax(torch.tensor(numbers, dtype=dtype))
        assert result.dtype == torch.float32
        assert result.shape == ()
        return result.item()

    assert of(1.5, -3.0, 2.0) == 3
    assert of(-0.0) == 0
    assert of() == 0
    assert of(1.0, -torch.inf) == torch.inf
    # NaNs are passed over.
    assert of(torch.nan, -2.0, 1.0) == 2
    assert of(torch.nan, -torch.inf) == torch.inf
    assert of(torch.nan, torch.nan) == 0
    smallest = torch.finfo(dtype).smallest_normal / 2
    assert of(smallest) == smallest
