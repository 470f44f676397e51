"""Dropout of TE's operation fuser on the stand-in."""

from __future__ import annotations

import pytest
import torch

te = pytest.importorskip("transformer_engine.pytorch")
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.pytorch.ops import Dropout  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_forward_and_backward_keep_the_same_elements(dtype: torch.dtype, probability: float) -> None:
    x = torch.randn(64, 128).to(dtype)
    y, mask = tex.dropout_fwd(x, probability)
    assert mask.shape == (x.numel() // 8,)
    assert mask.dtype == torch.uint8
    kept = tex.dropout_bwd(torch.ones_like(x), mask, probability)
    assert abs(float(kept.ne(0).float().mean()) - (1 - probability)) < 0.02
    torch.testing.assert_close(y, x * kept)
    if probability < 1:
        assert set(kept.unique().tolist()) <= {0.0, torch.tensor(1 / (1 - probability)).to(dtype).item()}


def test_te_operation_repeats_with_its_seed() -> None:
    operation, x = Dropout(0.5), torch.randn(4, 16, dtype=torch.bfloat16)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(operation(x))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert torch.equal(operation.eval()(x), x)
