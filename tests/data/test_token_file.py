"""Token files are Megatron's, byte for byte, and never half a pair."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from token_file_reference import decode_token_file

from megatron_fp8.data.token_file import read_index, token_dtype
from megatron_fp8.device import prepare
from megatron_fp8.prepare.token_file_writer import TokenFileWriter

prepare()  # Megatron Core is imported below

import torch  # noqa: E402
from megatron.core.datasets.indexed_dataset import (  # noqa: E402
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
)

VOCAB_SIZES = (300, 65_499, 65_500, 65_536, 65_537, 250_000)
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


def write(prefix: Path, vocab_size: int, documents: list[list[int]]) -> None:
    """The documents through our writer, in two calls."""
    with TokenFileWriter(prefix, vocab_size) as writer:
        half = len(documents) // 2
        for part in (documents[:half], documents[half:]):
            ids = [token for document in part for token in document]
            lengths = [len(document) for document in part]
            writer.add_documents(np.array(ids, dtype=writer.dtype), lengths)


def write_with_megatron(prefix: Path, vocab_size: int, documents: list[list[int]]) -> None:
    """The documents through Megatron Core's builder."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{prefix}.idx")


@st.composite
def files(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """A vocabulary size and documents of ids below it."""
    vocab_size = draw(st.sampled_from(VOCAB_SIZES))
    document = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=20)
    return vocab_size, draw(st.lists(document, min_size=1, max_size=10))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(file=files())
def test_bytes_are_megatrons_and_documents_come_back(file: tuple[int, list[list[int]]], tmp_path: Path) -> None:
    vocab_size, documents = file
    write(tmp_path / "ours", vocab_size, documents)
    write_with_megatron(tmp_path / "megatron", vocab_size, documents)
    for suffix in ("bin", "idx"):
        ours, theirs = (tmp_path / f"{name}.{suffix}" for name in ("ours", "megatron"))
        assert ours.read_bytes() == theirs.read_bytes()
    dataset = IndexedDataset(str(tmp_path / "ours"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents
    assert decode_token_file(tmp_path / "ours") == documents
    index = read_index(tmp_path / "ours")
    assert index.num_documents == len(documents)
    assert index.num_tokens == sum(map(len, documents))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_dtype_holds_every_id_and_is_megatrons(vocab_size: int) -> None:
    dtype = token_dtype(vocab_size)
    assert np.iinfo(dtype).max >= vocab_size - 1
    assert dtype == np.dtype(DType.optimal_dtype(vocab_size))


def test_ids_that_would_wrap_around_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="uint16"), TokenFileWriter(tmp_path / "a", 300) as writer:
        writer.add_documents(np.array([70_000], dtype=np.int32), [1])
    assert list(tmp_path.iterdir()) == []


def test_lengths_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 ids"), TokenFileWriter(tmp_path / "a", 300) as writer:
        writer.add_documents(np.array([1, 2, 3], dtype=np.uint16), [1, 1])


def test_an_interrupted_write_leaves_the_old_pair_alone(tmp_path: Path) -> None:
    write(tmp_path / "a", 300, [[1, 2], [3]])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(OverflowError), TokenFileWriter(tmp_path / "a", 300) as writer:
        writer.add_documents(np.full(1000, 7, dtype=np.uint16), [1000 - 2**40, 2**40])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_pair_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path / "a", 300, [[1, 2], [3]])
    write(tmp_path / "a", 300, [[4, 5, 6]])
    assert decode_token_file(tmp_path / "a") == [[4, 5, 6]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]
