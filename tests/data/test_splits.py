"""A split divides documents as Megatron does."""

from __future__ import annotations

import pytest

from megatron_fp8.config.schema import DataConfig
from megatron_fp8.data.blend import BlendError, DataKeyError, parse_split, train_blend, valid_blend
from megatron_fp8.device import prepare


@pytest.mark.parametrize("text", ["969,30,1", "969, 30, 1", "90,10", "1", "0.5,0.25,0.25", "98,2,0", "1,1,1", "0,1,0"])
@pytest.mark.parametrize("num_documents", [1, 3, 10, 999, 1000, 123_457])
def test_shares_are_megatrons(text: str, num_documents: int) -> None:
    prepare()
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    theirs = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
    data = DataConfig(data_path=["a"], split=text)
    for blend, share in zip((train_blend(data), valid_blend(data)), theirs, strict=False):
        begin, end = share if share is not None else (0, 0)
        expected = range(round(begin * float(num_documents)), round(end * float(num_documents)))
        assert len(blend.documents(num_documents)) == len(expected)
        if expected:
            assert blend.documents(num_documents) == expected


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "0,0,0", "-1,2", "1,,1", "inf,1", "nan"])
def test_invalid_splits_are_refused(text: str) -> None:
    with pytest.raises(BlendError, match="969,30,1"):
        parse_split(text)
    if text:
        with pytest.raises(DataKeyError) as error:
            train_blend(DataConfig(data_path=["a"], split=text))
        assert (error.value.problem.key, error.value.problem.value) == ("data.split", text)


def test_a_split_keeps_a_blends_weights_and_covers_each_document_once() -> None:
    data = DataConfig(data_path=["3", "a", "1", "b"])
    train, valid = train_blend(data), valid_blend(data)
    assert train.weights == valid.weights == (3, 1)
    assert train.documents(1000) == range(969)
    assert valid.documents(1000) == range(969, 999)


def test_files_of_their_own_are_read_whole() -> None:
    data = DataConfig(train_data_path=["a"], valid_data_path=["b"])
    assert train_blend(data).prefixes == ("a",)
    assert valid_blend(data).documents(7) == range(7)


def test_an_invalid_list_names_its_key() -> None:
    for data in (DataConfig(valid_data_path=["0.5", "a", "b"]), DataConfig(data_path=["0.5", "a", "b"])):
        with pytest.raises(DataKeyError) as error:
            valid_blend(data)
        assert error.value.problem.key == f"data.{'data_path' if data.data_path else 'valid_data_path'}"
        assert error.value.problem.value == ["0.5", "a", "b"]
