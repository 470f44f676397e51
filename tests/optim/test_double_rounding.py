"""FP8 weights are rounded twice, as Transformer Engine has it: what `docs/precision.md` says of it, measured."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_on_ranks

NUM_ROWS, NUM_COLUMNS = 1024, 1024


def cast_by_transformer_engine(power_of_2: bool) -> dict[str, float]:
    """Of normal FP32 masters: shares of E4M3 codes, and relative errors of the weights, by the way of rounding."""
    import torch
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
    from transformer_engine.pytorch.tensor.utils import cast_master_weights_to_fp8

    from megatron_fp8 import device as devices

    device = devices.prepare().torch_device
    generator = torch.Generator().manual_seed(7)
    master = 0.02 * torch.randn(NUM_ROWS, NUM_COLUMNS, generator=generator).to(device)
    scale = 448 / master.abs().max()
    if power_of_2:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    quantizer = Float8Quantizer(scale.view(1).clone(), torch.zeros(1, device=device), tex.DType.kFloat8E4M3)
    weight = quantizer(master.to(torch.bfloat16))
    weight._data.zero_()
    cast_master_weights_to_fp8([weight], [master.view(-1)], [0], torch.distributed.group.WORLD)
    codes = weight._data

    def rounded(values: Any) -> Any:
        return (values.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    def error(values: Any) -> float:
        return float((values.double() / scale.double() - master.double()).norm() / master.double().norm())

    once, twice = rounded(master), rounded(master.to(torch.bfloat16))
    assert torch.equal(codes, twice.view(torch.uint8)), "the FP8 weight is the BF16 master's"
    return {
        "differ": float((codes != once.view(torch.uint8)).double().mean()),
        "once": error(once),
        "twice": error(twice),
    }


@pytest.mark.parametrize(
    ("power_of_2", "differ", "more"),
    [
        # Rounding to BF16 moves a value by a quarter of a BF16 step on average, and there is one boundary between two
        # codes for 16 of these steps: 1/64, as long as the scale is no power of 2.
        (False, 1 / 64, 1.0022),
        # With a power of 2 the boundaries are BF16 numbers: one value in 16 is rounded onto one, half of them wrongly.
        (True, 1 / 32, 1.0058),
    ],
)
def test_so_many_codes_are_those_of_the_neighbour(power_of_2: bool, differ: float, more: float) -> None:
    (measured,) = run_on_ranks(1, cast_by_transformer_engine, power_of_2)
    assert measured["differ"] == pytest.approx(differ, rel=0.06)
    assert measured["once"] == pytest.approx(0.0265, rel=0.01)
    assert measured["twice"] / measured["once"] == pytest.approx(more, abs=0.001)
