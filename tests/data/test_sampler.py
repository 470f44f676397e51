"""Which rank reads which sample when: the same global batches in every layout."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fp8.data.loader import BatchSampler


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, int]:
    """dp_size, micro_batch_size, global_batch_size."""
    dp_size = draw(st.integers(1, 8))
    micro_batch_size = draw(st.integers(1, 8))
    return dp_size, micro_batch_size, dp_size * micro_batch_size * draw(st.integers(1, 6))


def all_ranks(layout: tuple[int, int, int], consumed_samples: int) -> list[tuple[range, ...]]:
    """What each rank reads in one step."""
    dp_size, micro_batch_size, global_batch_size = layout
    return [
        BatchSampler(micro_batch_size, global_batch_size, rank, dp_size).micro_batches(consumed_samples)
        for rank in range(dp_size)
    ]


@given(layout=layouts(), consumed_samples=st.integers(0, 10**12))
def test_a_global_batch_is_the_next_samples_each_once(layout: tuple[int, int, int], consumed_samples: int) -> None:
    shares = all_ranks(layout, consumed_samples)
    read = sorted(chain.from_iterable(chain.from_iterable(shares)))
    assert read == list(range(consumed_samples, consumed_samples + layout[2]))


@given(layout=layouts(), consumed_samples=st.integers(0, 10**6))
def test_ranks_do_equal_work(layout: tuple[int, int, int], consumed_samples: int) -> None:
    dp_size, micro_batch_size, global_batch_size = layout
    sampler = BatchSampler(micro_batch_size, global_batch_size, 0, dp_size)
    for share in all_ranks(layout, consumed_samples):
        assert len(share) == sampler.num_micro_batches
        assert all(len(indices) == micro_batch_size for indices in share)


@given(layout=layouts(), num_steps=st.integers(1, 5))
def test_an_epoch_reads_every_sample_once(layout: tuple[int, int, int], num_steps: int) -> None:
    size = layout[2]
    read = [
        index
        for step in range(num_steps)
        for share in all_ranks(layout, step * size)
        for indices in share
        for index in indices
    ]
    assert sorted(read) == list(range(num_steps * size))


def test_the_order_is_megatrons() -> None:
    """Micro-batch m takes the m-th run of dp_size x micro_batch_size samples, rank r its r-th part."""
    assert all_ranks((2, 2, 8), 100) == [
        (range(100, 102), range(104, 106)),
        (range(102, 104), range(106, 108)),
    ]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 8, 0, 1), "not divisible by micro_batch_size 3 x dp_size 1"),
        ((2, 4, 0, 4), "not divisible by micro_batch_size 2 x dp_size 4"),
        ((1, 4, 2, 2), "dp_rank 2 must be from 0 to dp_size - 1 = 1"),
        ((0, 4, 0, 1), "at least 1"),
        ((1, 0, 0, 1), "at least 1"),
    ],
)
def test_sizes_that_are_not_divisible_are_refused(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSampler(*sizes)
