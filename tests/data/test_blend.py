"""Lists of data paths are parsed as in Megatron, and invalid ones are refused."""

import pytest

from megatron_fp8.data.blend import Blend, BlendError, parse_blend


@pytest.mark.parametrize(
    ("entries", "blend"),
    [
        (["data/a"], Blend(("data/a",), None)),
        (["data/a", "data/b"], Blend(("data/a", "data/b"), None)),
        (["data/a", "data/b", "data/c"], Blend(("data/a", "data/b", "data/c"), None)),
        (["0.7", "data/a", "0.3", "data/b"], Blend(("data/a", "data/b"), (0.7, 0.3))),
        (["30", "data/a"], Blend(("data/a",), (30.0,))),
        (["1e-9", "data/a", "1", "data/b"], Blend(("data/a", "data/b"), (1e-9, 1.0))),
    ],
)
def test_prefixes_and_weights(entries: list[str], blend: Blend) -> None:
    assert parse_blend(entries) == blend


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([], "no data path"),
        (["0.7", "data/a", "data/b"], "0.7 is a number where a path is expected"),
        (["0.7", "data/a", "data/b", "0.3"], "is a number where a path is expected"),
        (["data/a", "0.7", "data/b", "0.3"], "is a number where a path is expected"),
        (["-1", "data/a", "1", "data/b"], "the weight of data/a is -1.0"),
        (["0", "data/a", "1", "data/b"], "the weight of data/a is 0.0"),
        (["nan", "data/a", "1", "data/b"], "the weight of data/a is nan"),
        (["inf", "data/a", "1", "data/b"], "the weight of data/a is inf"),
        (["data/a.bin"], "names one file of the pair"),
        (["data/a", "data/a"], "listed more than once"),
    ],
)
def test_invalid_lists_are_refused(entries: list[str], reason: str) -> None:
    with pytest.raises(BlendError) as caught:
        parse_blend(entries)
    assert reason in caught.value.reason
    assert caught.value.use_instead
