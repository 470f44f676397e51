"""Merged and split token files have the bytes that preprocessing gives; an independent reader reads them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from token_file_reference import decode_token_file

from megatron_fp8.data.token_file import TokenFileError
from megatron_fp8.prepare import merge_split
from megatron_fp8.prepare.merge_split import MergeSplitError, Share, merge, split
from megatron_fp8.prepare.token_file_writer import TokenFileWriter

Documents = list[list[int]]


def documents_of(number: int, seed: int, largest: int = 299) -> Documents:
    """Random documents, an empty one among them."""
    generator = np.random.default_rng(seed)
    documents = [generator.integers(0, largest + 1, size=generator.integers(1, 50)).tolist() for _ in range(number)]
    return [*documents[:2], [], *documents[2:]]


def write(prefix: Path, documents: Documents, vocab_size: int = 300) -> str:
    """A token file of these documents."""
    with TokenFileWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add_documents(np.array(document, dtype=writer.dtype), [len(document)])
    return str(prefix)


def content(prefix: Path | str) -> tuple[bytes, bytes]:
    """Both files."""
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("part_bytes", [16, 200, 2**24])
def test_a_merged_file_has_the_bytes_of_one_that_was_written_at_once(
    part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_split, "PART_BYTES", part_bytes)
    parts = [documents_of(number, seed) for seed, number in enumerate((7, 30, 1))]
    prefixes = [write(tmp_path / f"part{number}", part) for number, part in enumerate(parts)]
    together = write(tmp_path / "together", [document for part in parts for document in part])
    read: list[int] = []
    index = merge(prefixes, str(tmp_path / "merged"), on_bytes=read.append)
    assert content(tmp_path / "merged") == content(together)
    assert sum(read) == len(content(together)[0])
    assert index.num_documents == sum(map(len, parts))


def test_files_of_different_widths_become_the_wider_one(tmp_path: Path) -> None:
    """Ids above 65,535 stay what they are, and so do those that were two bytes wide."""
    small, large = documents_of(5, 1), [[70_000, 1], [123_456]]
    prefixes = [write(tmp_path / "small", small), write(tmp_path / "large", large, vocab_size=200_000)]
    assert merge(prefixes, str(tmp_path / "merged")).dtype == np.int32
    assert decode_token_file(tmp_path / "merged") == [*small, *large]
    assert content(tmp_path / "merged") == content(write(tmp_path / "together", [*small, *large], vocab_size=200_000))


@pytest.mark.parametrize("part_bytes", [16, 2**24])
def test_shares_become_files(part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_split, "PART_BYTES", part_bytes)
    documents = documents_of(19, 3)
    prefix = write(tmp_path / "all", documents)
    ranges = {"a": range(12), "b": range(12, 19), "c": range(19, 20)}
    split(prefix, [Share(str(tmp_path / name), documents) for name, documents in ranges.items()])
    for name, part in ranges.items():
        expected = write(tmp_path / f"expected-{name}", documents[part.start : part.stop])
        assert content(tmp_path / name) == content(expected)
    merge([str(tmp_path / name) for name in ranges], str(tmp_path / "again"))
    assert content(tmp_path / "again") == content(prefix)


def test_only_empty_documents_can_be_copied(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [[1, 2], [], []])
    split(prefix, [Share(str(tmp_path / "b"), range(1, 3))])
    assert decode_token_file(tmp_path / "b") == [[], []]


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    prefix, other = write(tmp_path / "a", [[1]]), write(tmp_path / "b", [[2]])
    before = content(other)
    with pytest.raises(MergeSplitError, match=r"b\.bin exists"):
        merge([prefix], other)
    assert content(other) == before
    with pytest.raises(MergeSplitError, match="is also an input"):
        merge([prefix, other], other, overwrite=True)
    merge([prefix], other, overwrite=True)
    assert content(other) == content(prefix)
    with pytest.raises(MergeSplitError, match="create it first"):
        merge([prefix], str(tmp_path / "no" / "c"))


def test_a_corrupt_input_leaves_no_output(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "good", [[1, 2, 3]]), write(tmp_path / "bad", [[4, 5, 6]])
    (tmp_path / "bad.bin").write_bytes(b"\x04\x00")
    with pytest.raises(MergeSplitError, match=r"bad\.bin has 2 bytes, but its index implies 6"):
        merge([good, bad], str(tmp_path / "out"))
    with pytest.raises(TokenFileError, match="does not exist"):
        merge([good, str(tmp_path / "none")], str(tmp_path / "out"))
    with pytest.raises(MergeSplitError, match="would get none of the 1 documents"):
        split(good, [Share(str(tmp_path / "out"), range(1, 1))])
    assert not list(tmp_path.glob("out*"))


def test_an_interruption_leaves_no_output(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", documents_of(20, 1))

    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge([prefix], str(tmp_path / "out"), on_bytes=interrupt)
    assert not list(tmp_path.glob("out*"))


def test_documents_of_several_sequences_are_refused(tmp_path: Path) -> None:
    """One document of two sequences, as Megatron's --split-sentences writes it."""
    prefix = write(tmp_path / "a", [[1, 2], [3]])
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 2, 2)
    (tmp_path / "a.idx").write_bytes(
        header + struct.pack("<2i", 2, 1) + struct.pack("<2q", 0, 4) + struct.pack("<2q", 0, 2)
    )
    with pytest.raises(MergeSplitError, match="1 documents of 2 sequences"):
        merge([prefix], str(tmp_path / "out"))
