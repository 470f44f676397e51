"""Every format gives the texts that were put in, from any position, in bounded blocks."""

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron_fp8.prepare.encode import BrokenLineError, Settings, TokenizerFile, texts_of
from megatron_fp8.prepare.input_files import InputError, find_inputs, skipped_inputs
from megatron_fp8.prepare.text_blocks import Block, Position, read_blocks

TEXTS = [f"Text {number}: " + "Füße 東京\n" * (number % 5) for number in range(60)]
SETTINGS = Settings(TokenizerFile(None, "ByteLevelTokenizer"))
Write = Callable[[Path, Sequence[str]], Path]


def jsonl(folder: Path, texts: Sequence[str]) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def gzipped(folder: Path, texts: Sequence[str]) -> Path:
    path = folder / "texts.jsonl.gz"
    half = jsonl(folder, texts).read_bytes()
    path.write_bytes(gzip.compress(half[:100]) + gzip.compress(half[100:]))
    return path


def zstandard_frames(folder: Path, texts: Sequence[str]) -> Path:
    path = folder / "texts.jsonl.zst"
    content = jsonl(folder, texts).read_bytes()
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(compress(content[:100]) + compress(content[100:]))
    return path


def bzip2_streams(folder: Path, texts: Sequence[str]) -> Path:
    path = folder / "texts.jsonl.bz2"
    content = jsonl(folder, texts).read_bytes()
    path.write_bytes(bz2.compress(content[:100]) + bz2.compress(content[100:]))
    return path


def xz_streams(folder: Path, texts: Sequence[str]) -> Path:
    path = folder / "texts.jsonl.xz"
    content = jsonl(folder, texts).read_bytes()
    path.write_bytes(lzma.compress(content[:100]) + lzma.compress(content[100:]))
    return path


def parquet(folder: Path, texts: Sequence[str]) -> Path:
    path = folder / "texts.parquet"
    columns = pyarrow.table({"id": list(range(len(texts))), "text": list(texts)})
    pyarrow.parquet.write_table(columns, path, row_group_size=7)
    return path


def text_files(folder: Path, texts: Sequence[str]) -> Path:
    for number, text in enumerate(texts):
        path = folder / "texts" / str(number // 10) / f"{number:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "texts" / ".hidden").write_text("not this")
    return folder / "texts"


FORMATS = [jsonl, gzipped, zstandard_frames, bzip2_streams, xz_streams, parquet, text_files]


def blocks(path: Path, start: Position | None = None, block_bytes: int = 200) -> list[Block]:
    return list(read_blocks(find_inputs([str(path)], "auto", ["text"]), ["text"], start or Position(), block_bytes))


def documents(found: Sequence[Block]) -> list[str]:
    """The documents of consecutive blocks."""
    return [text for block in found for text in texts_of(block, SETTINGS)[0]["text"]]


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_gives_its_texts_from_any_position(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path, TEXTS)
    found = blocks(path)
    assert documents(found) == TEXTS
    assert len(found) > 5
    assert max(block.size_bytes for block in found) < 600
    total = sum(file.size_bytes for file in find_inputs([str(path)], "auto", ["text"]))
    done = [block.done_bytes for block in found]
    assert done == sorted(done)
    assert done[-1] == total
    for number in (0, len(found) // 2, len(found) - 1):
        rest = blocks(path, found[number].end)
        assert documents(rest) == TEXTS[len(documents(found[: number + 1])) :]
        assert not rest or rest[0].first_number == found[number].end.number


def test_a_text_file_is_one_document_however_long(tmp_path: Path) -> None:
    long = "many words\n" * 1000
    for name, text in (("a", "short"), ("b", long), ("c", ""), ("d", "end")):
        (tmp_path / f"{name}.txt").write_text(text)
    found = blocks(tmp_path)
    assert documents(found) == ["short", long, "", "end"]
    assert [len(block.files) for block in found] == [1, 1, 2]


def test_a_text_file_beyond_the_limit_is_skipped_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fp8.prepare.text_blocks.MAX_TEXT_BYTES", 1000)
    texts = {"a": "one", "b": "x" * 1001, "c": "x" * 1000, "d": "three"}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    found = blocks(tmp_path)
    with pytest.raises(BrokenLineError, match=r"b\.txt: longer than .* bytes; divide it into several documents"):
        documents(found)
    skipping = Settings(TokenizerFile(None, "ByteLevelTokenizer"), skip_broken_lines=True)
    kept = [texts_of(block, skipping) for block in found]
    assert [len(broken) for _, broken in kept if broken] == [1]
    assert [text for by_key, _ in kept for text in by_key["text"]] == ["one", texts["c"], "three"]
    assert found[-1].end == Position(4)


def test_a_line_beyond_the_limit_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fp8.prepare.text_blocks.MAX_TEXT_BYTES", 1000)
    path = jsonl(tmp_path, ["one", "x" * 5000, "two"])
    found = blocks(path)
    with pytest.raises(BrokenLineError, match=r"texts\.jsonl, line 2: longer than .* bytes"):
        documents(found)
    assert documents([block for block in found if not block.too_long]) == ["one", "two"]
    assert found[-1].first_number == 3


@pytest.mark.parametrize("write", [gzipped, zstandard_frames, bzip2_streams, xz_streams, parquet])
def test_a_truncated_file_is_named(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path, TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"texts\.\S+ is (corrupt or truncated|not a complete Parquet file)"):
        blocks(path)


def test_several_inputs_come_in_the_order_they_were_named(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        jsonl(tmp_path / name, [f"of {name}"])
    parquet(tmp_path, ["of columns"])
    names = [str(tmp_path / "texts.parquet"), str(tmp_path / "*" / "*.jsonl")]
    found = list(read_blocks(find_inputs(names, "auto", ["text"]), ["text"]))
    assert documents(found) == ["of columns", "of a", "of b"]
    with pytest.raises(InputError, match="is named twice"):
        find_inputs([str(tmp_path / "a"), *names], "auto", ["text"])


def test_columns_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    path = parquet(tmp_path, TEXTS)
    with pytest.raises(InputError, match=r"column 'id' is int64; text columns: text"):
        find_inputs([str(path)], "auto", ["id"])
    with pytest.raises(InputError, match=r"no column 'body'; text columns: text"):
        find_inputs([str(path)], "auto", ["body"])


def test_invalid_text_is_a_broken_line(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["one", None]})
    pyarrow.parquet.write_table(table, tmp_path / "holes.parquet")
    with pytest.raises(BrokenLineError, match=r"holes\.parquet, line 2: 'text' is null"):
        documents(blocks(tmp_path / "holes.parquet"))
    (tmp_path / "latin.txt").write_bytes(b"F\xfc\xdfe")
    with pytest.raises(BrokenLineError, match=r"latin\.txt: not UTF-8"):
        documents(blocks(tmp_path / "latin.txt"))


def test_a_large_window_of_zstandard_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    parameters = zstandard.ZstdCompressionParameters(window_log=31, compression_level=1)
    # Without a size, as of a stream, so that the frame asks for the window whatever it holds.
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path.write_bytes(frame.compress(b'{"text": "long"}\n') + frame.flush())
    assert documents(blocks(path)) == ["long"]


def test_an_invalid_unicode_value_of_a_column_is_one_broken_row(tmp_path: Path) -> None:
    values = pyarrow.array([b"fine", b"\xff", None, b"too"], pyarrow.binary())
    # pyarrow checks nothing here, like other writers.
    texts = pyarrow.Array.from_buffers(pyarrow.string(), len(values), values.buffers())
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    (block,) = blocks(path, block_bytes=2**20)
    assert block.rows is not None
    assert block.rows["text"] == ["fine", b"\xff", None, "too"]
    by_key, broken = texts_of(block, Settings(TokenizerFile(None), ("text",), skip_broken_lines=True))
    assert by_key["text"] == ["fine", "too"]
    assert [(error.line_number, error.reason) for error in broken] == [
        (2, "'text' is not UTF-8"),
        (3, "'text' is null"),
    ]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["text", "text"]), path)
    with pytest.raises(InputError, match="2 columns 'text'"):
        find_inputs([str(path)], "auto", ["text"])


def test_links_are_followed_once_and_no_file_is_read_twice(tmp_path: Path) -> None:
    folder, other = tmp_path / "in", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (folder / "a.txt").write_text("a")
    (other / "b.txt").write_text("b")
    (folder / "linked").symlink_to(other)
    (other / "back").symlink_to(folder)
    found = find_inputs([str(folder)], "auto", ["text"])
    assert [file.path.name for file in found] == ["a.txt", "b.txt"]
    for again in (folder / ".." / "in" / "a.txt", other / "b.txt"):
        with pytest.raises(InputError, match="is named twice, also as"):
            find_inputs([str(folder), str(again)], "auto", ["text"])


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="neither a file nor a folder"):
        find_inputs([str(tmp_path / "pipe")], "auto", ["text"])


def test_a_byte_order_mark_at_the_beginning_of_a_file_is_not_text(tmp_path: Path) -> None:
    mark = "\N{ZERO WIDTH NO-BREAK SPACE}"
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text(f"{mark}text {mark}{number}", encoding="utf-8")
    assert documents(blocks(tmp_path)) == [f"text {mark}0", f"text {mark}1"]


def test_a_record_nested_too_deeply_is_a_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "before"}\n' + '{"text": "x", "deep": ' + "[" * 10**5 + "]" * 10**5 + "}\n")
    (block,) = blocks(path, block_bytes=2**20)
    by_key, broken = texts_of(block, Settings(TokenizerFile(None), ("text",), skip_broken_lines=True))
    assert by_key["text"] == ["before"]
    assert [error.line_number for error in broken] == [2]


def test_only_known_suffixes_are_read_as_text(tmp_path: Path) -> None:
    foreign = ["README", "a.csv", "a.jsonl.bak", "page.html", "part-00002"]
    for name in foreign:
        (tmp_path / name).write_text('{"text": "x"}\n')
    for names in ([str(tmp_path)], [str(tmp_path / "*")], [str(tmp_path / "part-00002")]):
        with pytest.raises(InputError, match=r"part-00002: no known suffix .*--input-format"):
            find_inputs(names, "auto", ["text"])
    (tmp_path / "good.jsonl").write_text('{"text": "x"}\n')
    for name in (str(tmp_path), str(tmp_path / "*")):
        assert [file.path.name for file in find_inputs([name], "auto", ["text"])] == ["good.jsonl"]
        assert [path.name for path in skipped_inputs([name], "auto")] == foreign
        assert {file.format for file in find_inputs([name], "jsonl", ["text"])} == {"jsonl"}
        assert len(find_inputs([name], "jsonl", ["text"])) == len(foreign) + 1
        assert skipped_inputs([name], "jsonl") == []
