"""Where ranks' parts of a parameter lie in the whole: against the parameter cut for real."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fp8.checkpoint.parameter_boxes import Placement
from megatron_fp8.model.sharding import ParameterSharding

SHARDINGS = [
    ParameterSharding(axis=None),
    ParameterSharding(axis=0),
    ParameterSharding(axis=1),
    ParameterSharding(axis=0, num_parts=2),
    ParameterSharding(axis=0, is_padded_vocab=True),
]


@st.composite
def cuts(draw):
    """A parameter, how it is divided, and where the flat shard of each rank is cut for the optimizer."""
    sharding = draw(st.sampled_from(SHARDINGS))
    tp_size = draw(st.integers(1, 4))
    rows = draw(st.integers(1, 5)) * sharding.num_parts
    columns = draw(st.integers(1, 7))
    one_axis = sharding.axis != 1 and draw(st.booleans())
    local = (rows,) if one_axis else (rows, columns)
    num_rows = draw(st.integers(1, rows * tp_size)) if sharding.is_padded_vocab else None
    size = rows * (1 if one_axis else columns)
    bounds = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
    return sharding, local, tp_size, num_rows, [0, *bounds, size]


@settings(max_examples=300, deadline=None)
@given(cuts())
def test_boxes_put_every_element_where_it_belongs(cut) -> None:
    sharding, local, tp_size, num_rows, bounds = cut
    padded = torch.arange(torch.tensor(sharding.full_shape(torch.Size(local), tp_size)).prod().item())
    padded = padded.reshape(sharding.full_shape(torch.Size(local), tp_size))
    whole = padded if num_rows is None else padded[:num_rows]
    rebuilt = torch.full_like(whole, -1)
    for rank in range(tp_size):
        placement = Placement(sharding, local, rank, tp_size, num_rows)
        assert placement.whole_shape == tuple(whole.shape)
        flat = sharding.local_shard(padded, rank, tp_size).reshape(-1)
        for start, stop in itertools.pairwise(bounds):
            boxes = list(placement.boxes(start, stop))
            assert len(boxes) <= 3 * sharding.num_parts
            for box in boxes:
                assert start <= box.start < box.stop <= stop
                target = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                if sharding.axis is not None:
                    assert (rebuilt[target] == -1).all()
                rebuilt[target] = flat[box.start : box.stop].reshape(box.shape)
    assert torch.equal(rebuilt, whole)
