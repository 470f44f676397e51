"""Packed sequences: conversions and the share of a context-parallel rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

te = pytest.importorskip("transformer_engine.pytorch")
import transformer_engine_torch as tex  # noqa: E402


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 2))
def test_padding_and_packing_are_inverse(lengths: list[int], extra: int) -> None:
    tokens, longest = sum(lengths), max(lengths) + extra
    packed = torch.randn(tokens, 2, 3)
    padded = tex.convert_thd_to_bshd(packed, cumulative(lengths), len(lengths), longest)
    assert padded.shape == (len(lengths), longest, 2, 3)
    for row, length, sequence in zip(padded, lengths, packed.split(lengths), strict=True):
        assert torch.equal(row[:length], sequence)
        assert row[length:].eq(0).all()
    again = tex.convert_bshd_to_thd(padded, cumulative(lengths), tokens + extra)
    assert torch.equal(again[:tokens], packed)
    assert again[tokens:].eq(0).all()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_every_sequence_evenly(world_size: int) -> None:
    lengths = [2 * world_size, 6 * world_size]
    shares = [
        tex.thd_get_partitioned_indices(cumulative(lengths), sum(lengths), world_size, rank)
        for rank in range(world_size)
    ]
    assert sorted(torch.cat(shares).tolist()) == list(range(sum(lengths)))
    # Causal attention's work, the number of keys before each query, is the same on every rank.
    work = [sum(i if i < lengths[0] else i - lengths[0] for i in share.tolist()) for share in shares]
    assert len(set(work)) == 1


def test_a_sequence_that_cannot_be_cut_is_named() -> None:
    with pytest.raises(ValueError, match="6 tokens cannot be cut into 4"):
        tex.thd_get_partitioned_indices(cumulative([4, 6]), 10, 2, 0)
