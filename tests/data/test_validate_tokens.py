"""Corrupt token files are found before a run, each with its reason."""

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_fp8.data import check_data
from megatron_fp8.data.check_data import check_token_file
from megatron_fp8.prepare.token_file_writer import TokenFileWriter

VOCAB_SIZE = 300


def write(prefix: Path, lengths: list[int], largest_id: int = VOCAB_SIZE - 1, vocab_size: int = 300) -> str:
    """A token file whose last id is `largest_id`; returns the prefix."""
    with TokenFileWriter(prefix, vocab_size) as writer:
        tokens = np.arange(sum(lengths)) % VOCAB_SIZE
        tokens[-1] = largest_id
        writer.add_documents(tokens.astype(writer.dtype), lengths)
    return str(prefix)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    """Change bytes in place."""
    data = bytearray(path.read_bytes())
    data[offset : offset + len(content)] = content
    path.write_bytes(bytes(data))


def cut(path: Path, num_bytes: int) -> None:
    """Truncate the file."""
    path.write_bytes(path.read_bytes()[:-num_bytes])


def index_of_another_file(bin_file: Path, idx_file: Path) -> None:
    """Give the pair the index of a file with other documents."""
    other = bin_file.parent / "other"
    write(other, [5, 6])
    Path(f"{other}.idx").replace(idx_file)


CORRUPTIONS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no .idx": (lambda b, i: i.unlink(), "a.idx does not exist"),
    "no .bin": (lambda b, i: b.unlink(), "a.bin does not exist"),
    ".bin cut off": (lambda b, i: cut(b, 1), "it is truncated"),
    ".bin cut to nothing": (lambda b, i: b.write_bytes(b""), "it is truncated"),
    ".bin too long": (lambda b, i: b.write_bytes(b.read_bytes() + b"\0\0"), "it is too long"),
    ".idx cut off": (lambda b, i: cut(i, 8), "implies"),
    ".idx cut inside the header": (lambda b, i: i.write_bytes(i.read_bytes()[:20]), "is truncated"),
    ".idx empty": (lambda b, i: i.write_bytes(b""), "is not a Megatron index"),
    "wrong magic": (lambda b, i: overwrite(i, 0, b"PK\x03\x04"), "is not a Megatron index"),
    "other version": (lambda b, i: overwrite(i, 9, struct.pack("<Q", 2)), "index version 2"),
    "unknown dtype": (lambda b, i: overwrite(i, 17, b"\x63"), "dtype code 99"),
    "float dtype": (lambda b, i: overwrite(i, 17, b"\x07"), "dtype code 7"),
    "other dtype": (lambda b, i: overwrite(i, 17, b"\x04"), "of int32"),
    "index of another file": (index_of_another_file, "the index belongs to another file"),
    "lengths changed": (lambda b, i: overwrite(i, 34, struct.pack("<ii", 101, 99)), "not contiguous"),
    "negative length": (lambda b, i: overwrite(i, 34, struct.pack("<i", -5)), "document of -5 tokens"),
    "offsets changed": (lambda b, i: overwrite(i, 34 + 8, struct.pack("<q", 4)), "not contiguous"),
    "marks changed": (lambda b, i: overwrite(i, 34 + 8 + 16, struct.pack("<q", 1)), "document marks"),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corruption_is_found_and_named(kind: str, tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [100, 100])
    assert check_token_file(prefix, VOCAB_SIZE) == []
    corrupt, reason = CORRUPTIONS[kind]
    corrupt(tmp_path / "a.bin", tmp_path / "a.idx")
    (problem,) = check_token_file(prefix, VOCAB_SIZE, key="data.valid_data_path")
    assert (problem.key, problem.value) == ("data.valid_data_path", prefix)
    assert reason in problem.reason
    assert "preprocess_data.py" in problem.use_instead


def test_an_empty_pair_is_refused(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "a", VOCAB_SIZE):
        pass
    (problem,) = check_token_file(str(tmp_path / "a"), VOCAB_SIZE)
    assert "has no documents" in problem.reason


def test_ids_outside_the_vocabulary_are_found(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [100], largest_id=VOCAB_SIZE)
    assert check_token_file(prefix, VOCAB_SIZE + 1) == []
    (problem,) = check_token_file(prefix, VOCAB_SIZE)
    assert "token id 300, but the vocabulary has 300 tokens" in problem.reason
    assert "data.tokenizer_model" in problem.use_instead


def test_ids_above_uint16_are_read_as_they_are(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [100], largest_id=70_000, vocab_size=70_001)
    assert check_token_file(prefix, 70_001) == []
    assert "token id 70000" in check_token_file(prefix, 70_000)[0].reason


def test_negative_ids_are_found(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [100], largest_id=-3, vocab_size=70_001)
    assert "token id -3" in check_token_file(prefix, 70_001)[0].reason


def test_large_files_are_sampled_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_data, "READ_WHOLE_UP_TO_BYTES", 10_000)
    monkeypatch.setattr(check_data, "SAMPLE_BYTES", 16)
    prefix = write(tmp_path / "a", [50_000], largest_id=VOCAB_SIZE)
    assert "token id 300" in check_token_file(prefix, VOCAB_SIZE)[0].reason


def test_the_position_of_a_bad_id_is_named(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", [100, 30, 70], largest_id=VOCAB_SIZE)
    assert "token 199 of the file, in document 2" in check_token_file(prefix, VOCAB_SIZE)[0].reason


def test_a_bad_id_anywhere_is_found_when_all_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the samples of a large file a check before a run sees nothing; `read_all` does."""
    monkeypatch.setattr(check_data, "READ_WHOLE_UP_TO_BYTES", 10_000)
    monkeypatch.setattr(check_data, "SAMPLE_BYTES", 16)
    prefix = write(tmp_path / "a", [50_000])
    overwrite(tmp_path / "a.bin", 2 * 100, struct.pack("<H", 301))
    assert check_token_file(prefix, VOCAB_SIZE) == []
    read: list[int] = []
    (problem,) = check_token_file(prefix, VOCAB_SIZE, read_all=True, on_bytes=read.append)
    assert "token id 301" in problem.reason
    assert "token 100 of the file" in problem.reason
    overwrite(tmp_path / "a.bin", 2 * 100, struct.pack("<H", 1))
    read.clear()
    assert check_token_file(prefix, VOCAB_SIZE, read_all=True, on_bytes=read.append) == []
    assert sum(read) == (tmp_path / "a.bin").stat().st_size
    assert check_data.bytes_read_for_ids(prefix) == 64 * 16


def test_the_check_runs_without_torch() -> None:
    program = (
        "import sys\n"
        "for name in ('torch', 'transformer_engine', 'megatron'): sys.modules[name] = None\n"
        "import megatron_fp8.data.check_data, megatron_fp8.data.order, megatron_fp8.prepare.quickstart\n"
        "import megatron_fp8.prepare.quickstart, megatron_fp8.prepare.preprocess\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
