"""Casting a block-scaled weight piece by piece gives the bytes of casting it whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron_fp8.cpu import install

install()

import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.pytorch import tensor as te  # noqa: E402

LENGTH = 128
# Whole blocks; edges that no block fits.
SHAPES = [(256, 256), (130, 200)]


def weight(h: int, w: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(2)
    return (torch.randn(h, w, generator=generator) * torch.logspace(-3, 3, w)).bfloat16()


def tiles(h: int, w: int) -> tuple[int, int]:
    return -(-h // LENGTH), -(-w // LENGTH)


@pytest.mark.parametrize("shape", SHAPES)
def test_amaxes_of_a_piece_are_those_of_its_elements(shape: tuple[int, int]) -> None:
    h, w = shape
    flat = weight(h, w).view(-1)
    # Inside a row; over the edge of two rows of blocks; the end; nothing.
    for start, end in [(5, 9), (w * 100 + 3, w * 129 + 1), (w * (h - 1) + 1, h * w), (7, 7)]:
        expected = np.zeros(tiles(h, w), dtype=np.float32)
        for element in range(start, end):
            i, j = element // w // LENGTH, element % w // LENGTH
            expected[i, j] = max(expected[i, j], abs(float(flat[element])))
        amax = torch.full((expected.shape[0], 4), torch.nan)
        tex.fp8_block_scaling_compute_partial_amax(flat[start:end], amax, h, w, start, LENGTH)
        assert torch.equal(amax[:, : expected.shape[1]], torch.from_numpy(expected).cuda()), (start, end)
        assert not amax[:, expected.shape[1] :].any()


@pytest.mark.parametrize("fp8", [tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2])
@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_make_up_the_whole(shape: tuple[int, int], fp8: Any) -> None:
    h, w = shape
    x = weight(h, w)
    whole = tex.quantize(x, te.Float8BlockQuantizer(fp8, rowwise=True, columnwise=False, block_scaling_dim=2))
    ends = [0, 1, w + 3, h * w // 2 + 1, h * w - 2, h * w]
    out = torch.zeros(h * w, dtype=torch.uint8)
    amaxes = []
    for start, end in pairwise(ends):
        amaxes.append(torch.empty(tiles(h, w)))
        tex.fp8_block_scaling_compute_partial_amax(x.view(-1)[start:end], amaxes[-1], h, w, start, LENGTH)
    amax = torch.stack(amaxes).amax(dim=0)
    scale, scale_inv = torch.empty_like(amax), torch.empty_like(amax)
    limit = 448.0 if fp8 == tex.DType.kFloat8E4M3 else 57344.0
    tex.multi_tensor_compute_scale_and_scale_inv(
        65536, torch.zeros(1, dtype=torch.int), [[amax], [scale], [scale_inv]], limit, True, 0.0
    )
    for start, end in pairwise(ends):
        tex.fp8_block_scaling_partial_cast(x.view(-1)[start:end], out[start:end], scale, h, w, start, LENGTH, fp8)
    assert torch.equal(out.view(h, w), whole._rowwise_data)
    assert torch.equal(scale_inv, whole._rowwise_scale_inv[:, : scale_inv.shape[1]])


def test_a_piece_saturates_and_rounds_as_ml_dtypes() -> None:
    x = weight(32, 64).view(-1)[40:1000]
    out = torch.empty(960, dtype=torch.uint8)
    # A scale too large for the piece: what exceeds 448 saturates.
    tex.fp8_block_scaling_partial_cast(x, out, torch.full((1, 4), 3.0), 32, 64, 40, LENGTH, tex.DType.kFloat8E4M3)
    scaled = x.float().cpu().numpy() * np.float32(3)
    assert np.abs(scaled).max() > 464
    expected = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(out.cpu().numpy(), expected)


def test_a_piece_outside_of_the_weight_is_refused() -> None:
    piece = torch.ones(4)
    with pytest.raises(ValueError, match="not all in 2 x 2"):
        tex.fp8_block_scaling_compute_partial_amax(piece, torch.empty(1, 4), 2, 2, 1, LENGTH)
    with pytest.raises(ValueError, match="not all in 2 x 2"):
        tex.fp8_block_scaling_partial_cast(
            piece, torch.empty(4, dtype=torch.uint8), torch.ones(1, 4), 2, 2, 1, LENGTH, tex.DType.kFloat8E4M3
        )
