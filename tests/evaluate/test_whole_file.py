"""A token file read whole: every token is predicted exactly once, from the right tokens; names of sets are unique."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_fp8.data.blend import dataset_names
from megatron_fp8.data.token_file import HEADER, MAGIC, TokenFileError
from megatron_fp8.data.validation import WholeFile
from megatron_fp8.prepare.token_file_writer import TokenFileWriter

EOD, SEQ_LENGTH = 0, 8


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 300) -> str:
    with TokenFileWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add_documents(np.array(document, dtype=writer.dtype), [len(document)])
    return str(prefix)


def documents_of(lengths: list[int], vocab_size: int = 300) -> list[list[int]]:
    generator = np.random.default_rng(len(lengths))
    return [[*generator.integers(1, vocab_size, size=length - 1).tolist(), EOD] for length in lengths]


def predicted(file: WholeFile, number: int | None = None) -> list[tuple[int, int]]:
    """(token before, token) of every token that counts, window by window."""
    pairs = []
    for index in range(len(file) if number is None else number):
        sample = file[index]
        counts = sample["loss_mask"].bool()
        pairs += list(zip(sample["tokens"][counts].tolist(), sample["labels"][counts].tolist(), strict=True))
    return pairs


@pytest.mark.parametrize("foreign", [300, -1])
def test_an_id_beyond_the_vocabulary_is_named_when_it_is_read(foreign: int, tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "a", dtype=np.dtype("<i4")) as writer:
        writer.add_documents(np.array([*range(1, 20), foreign], dtype=writer.dtype), [20])
    file = WholeFile(tmp_path / "a", SEQ_LENGTH, EOD, vocab_size=300)
    assert file[1]["labels"].tolist() == list(range(9, 17))
    with pytest.raises(TokenFileError, match=rf"a\.bin holds token id {foreign}, but the vocabulary has 300"):
        file[2]


@pytest.mark.parametrize("lengths", [[5, 9, 2, 7], [8], [1], [3, 13], [4, 4, 4, 4, 1]], ids=str)
@pytest.mark.parametrize("vocab_size", [300, 100_000])
def test_every_token_is_predicted_once_from_the_one_before_it(
    tmp_path: Path, lengths: list[int], vocab_size: int
) -> None:
    documents = documents_of(lengths, vocab_size)
    file = WholeFile(write(tmp_path / "a", documents, vocab_size), SEQ_LENGTH, EOD)
    text = [token for document in documents for token in document]
    assert file.num_tokens == len(text)
    assert predicted(file) == list(zip([EOD, *text], text, strict=False))
    assert len(file) == -(-len(text) // SEQ_LENGTH)
    assert (file[len(file) - 1]["labels"][file[len(file) - 1]["loss_mask"] == 0] != EOD).all(), "fills up, ends nothing"
    # Beyond the end come samples in which nothing counts, to fill a batch.
    assert file[len(file)]["loss_mask"].sum() == file[len(file) + 5]["loss_mask"].sum() == 0
    for index in range(len(file) + 1):
        sample = file[index]
        assert {value.shape for value in sample.values()} == {(SEQ_LENGTH,)}
        assert sample["tokens"][1:].tolist() == sample["labels"][:-1].tolist()
        assert sample["position_ids"].tolist() == list(range(SEQ_LENGTH))


def test_a_part_of_the_documents_is_a_file_of_its_own(tmp_path: Path) -> None:
    documents = documents_of([5, 9, 2, 7, 3])
    prefix = write(tmp_path / "a", documents)
    part = WholeFile(prefix, SEQ_LENGTH, EOD, documents=range(1, 4))
    text = [token for document in documents[1:4] for token in document]
    assert predicted(part) == list(zip([EOD, *text], text, strict=False))
    nothing = WholeFile(prefix, SEQ_LENGTH, EOD, documents=range(2, 2))
    assert (len(nothing), nothing.num_tokens) == (0, 0)


def test_documents_that_lie_in_another_order_with_gaps(tmp_path: Path) -> None:
    """An index of the format's other writers may point anywhere into the file."""
    content = np.arange(1, 41, dtype="<u2")
    (tmp_path / "a.bin").write_bytes(content.tobytes())
    starts, lengths = [30, 4, 12], [7, 6, 9]
    index = HEADER.pack(MAGIC, 1, 8, 3, 4) + struct.pack("<3i", *lengths)
    index += struct.pack("<3q", *(2 * start for start in starts)) + struct.pack("<4q", 0, 1, 2, 3)
    (tmp_path / "a.idx").write_bytes(index)
    text = [
        token
        for start, length in zip(starts, lengths, strict=True)
        for token in content[start : start + length].tolist()
    ]
    assert [token for _, token in predicted(WholeFile(tmp_path / "a", SEQ_LENGTH, EOD))] == text


def test_windows_of_a_sample_are_evenly_spaced(tmp_path: Path) -> None:
    documents = documents_of([30, 47, 20])
    prefix = write(tmp_path / "a", documents)
    whole, some = WholeFile(prefix, SEQ_LENGTH, EOD), WholeFile(prefix, SEQ_LENGTH, EOD, num_windows=4)
    assert (len(whole), len(some)) == (13, 4)
    for index, window in enumerate((0, 3, 6, 9)):
        assert all((some[index][name] == whole[window][name]).all() for name in whole[0])
    assert len(WholeFile(prefix, SEQ_LENGTH, EOD, num_windows=99)) == 13


def test_first_tokens_of_documents_can_be_left_out(tmp_path: Path) -> None:
    documents = documents_of([5, 9, 2, 7])
    file = WholeFile(write(tmp_path / "a", documents), SEQ_LENGTH, EOD, eod_mask_loss=True)
    assert [token for _, token in predicted(file)] == [token for document in documents for token in document[1:]]


@pytest.mark.parametrize(
    ("prefixes", "names"),
    [
        (["data/wiki_text_document"], ["wiki"]),
        (["data/wiki_text_document", "data/code_text_document"], ["wiki", "code"]),
        (["data/wiki_text_document", "data/code_document"], ["wiki_text", "code"]),
        (["a/valid", "b/valid", "c/train"], ["a/valid", "b/valid", "train"]),
        (["x/a/valid", "y/a/valid", "valid"], ["x/a/valid", "y/a/valid", "valid"]),
        (["a/_document", "b/_document"], ["a/_document", "b/_document"]),
        (["a/x", "./a/x"], ["a/x", "./a/x"]),
        (["w_text", "w_text_document"], ["w_text", "w_text_document"]),
    ],
)
def test_names_are_the_shortest_that_differ(prefixes: list[str], names: list[str]) -> None:
    assert dataset_names(prefixes) == names
