"""tools/data.py from the command line: what it prints, and its exit codes."""

from __future__ import annotations

import base64
import errno
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from token_file_reference import decode_token_file

from megatron_fp8.config.load import load_config
from megatron_fp8.data.blend import train_blend
from megatron_fp8.data.token_file import HEADER
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.device import prepare
from megatron_fp8.prepare.inspect_tokens import (
    PositionError,
    document_piece,
    position_piece,
    sample_pieces,
    statistics_of,
)
from megatron_fp8.prepare.token_file_writer import TokenFileWriter
from tests.command_line import exit_code
from tools.data import main

TEXTS = ["The quick brown fox jumps over the lazy dog.\n", "for index in range(10):\n", "def add(first, second):\n"]


@pytest.fixture
def prefix(tokenizer: Tokenizer, tmp_path: Path) -> str:
    """Sixty documents of real text, one of them empty, each other one ended."""
    with TokenFileWriter(tmp_path / "text", tokenizer.vocab_size) as writer:
        for number in range(60):
            ids = [] if number == 7 else [*tokenizer.encode(TEXTS[number % 3] * (1 + number % 5)), tokenizer.eod_id]
            writer.add_documents(np.array(ids, dtype=writer.dtype), [len(ids)])
    return str(tmp_path / "text")


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """(exit code, standard output, standard error) of the tool."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = exit_code(main, *arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_statistics_of_a_file(prefix: str) -> None:
    lengths = sorted(map(len, decode_token_file(prefix)))
    numbers = statistics_of(prefix)
    assert (numbers.num_documents, numbers.num_tokens, numbers.num_empty) == (60, sum(lengths), 1)
    assert numbers.longest == lengths[-1]
    assert numbers.quantiles[2] == lengths[29]
    for shortest, longest, count in numbers.histogram:
        assert count == sum(shortest <= length <= longest for length in lengths)
    assert sum(count for *_, count in numbers.histogram) == 59


def test_inspect(prefix: str, call: Call) -> None:
    code, output, _ = call("inspect", prefix)
    assert code == 0
    assert "documents  60, 1 of them empty" in output
    assert "of uint16" in output
    assert call("inspect", f"{prefix}-none")[0] == 2


def test_a_wrong_prefix_suggests_the_right_one(prefix: str, call: Call) -> None:
    assert call("inspect", f"{prefix}.bin")[2].endswith(f"give the prefix without its suffix: {prefix}\n")
    call("merge", prefix, "--output-prefix", f"{prefix}-o_text_document")
    code, _, error = call("inspect", f"{prefix}-o")
    assert (code, error.endswith(f"did you mean {prefix}-o_text_document?\n")) == (2, True)


def test_ranks_are_read_with_their_pattern(prefix: str, tmp_path: Path, call: Call) -> None:
    ranks = tmp_path / "ranks"
    lines = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    ranks.write_text("".join(lines))
    with TokenFileWriter(tmp_path / "bytes", 300) as writer:
        writer.add_documents(np.frombuffer(b"two words", "u1").astype(writer.dtype), [9])
    place = ("sample", tmp_path / "bytes", "--document", 0, "--tokenizer-model", ranks)
    assert "'two words'" in call(*place, "--tiktoken-pattern", "gpt2")[1]
    code, _, error = call(*place)
    assert (code, error.startswith("--tiktoken-pattern: "), "data." in error) == (2, True, False)


def test_every_place_of_a_file(prefix: str) -> None:
    documents = decode_token_file(prefix)
    position = 0
    for number, document in enumerate(documents):
        for token in range(len(document)):
            piece = position_piece(prefix, position, 5)
            assert (piece.document, piece.first, piece.tokens.tolist()) == (number, token, document[token : token + 5])
            position += 1
        assert document_piece(prefix, number, 0, 10_000).tokens.tolist() == document
    for wrong in (
        lambda: position_piece(prefix, position, 1),
        lambda: position_piece(prefix, -1, 1),
        lambda: document_piece(prefix, 60, 0, 1),
        lambda: document_piece(prefix, 0, len(documents[0]), 1),
    ):
        with pytest.raises(PositionError, match="has no"):
            wrong()


def test_sample_shows_text(prefix: str, tokenizer: Tokenizer, call: Call) -> None:
    code, output, _ = call("sample", prefix, "--document", 1, "--tokenizer-model", tokenizer.path)
    assert code == 0
    assert repr(TEXTS[1] * 2 + "<|endoftext|>") in output
    code, output, _ = call("sample", prefix, "--position", 0, "--length", 3)
    assert "tokens 0 to 2" in output
    assert call("sample", prefix, "--document", 60)[0] == 2


def config_for(prefix: str, tokenizer: Tokenizer, directory: Path) -> Path:
    """A run on a blend of the file's two halves."""
    path = directory / "config.yaml"
    path.write_text(
        f"run: {{name: test}}\nmodel: {{num_layers: 1, hidden_size: 16, num_attention_heads: 1, seq_length: 32}}\n"
        f"training: {{micro_batch_size: 1, global_batch_size: 4, train_iters: 100, eval_iters: 0}}\n"
        f"optimizer: {{lr: 1e-3}}\n"
        f"data:\n  tokenizer_model: {tokenizer.path}\n"
        f"  train_data_path: ['3', {prefix}-half_train, '1', {prefix}-half_valid]\n"
    )
    return path


def test_a_runs_sample_is_what_the_run_reads(prefix: str, tokenizer: Tokenizer, call: Call, tmp_path: Path) -> None:
    """The tool works the order out by itself; Megatron Core's dataset reads the same tokens, for several epochs."""
    assert call("split", prefix, "--output-prefix", f"{prefix}-half", "--split", "1,1")[0] == 0
    path = config_for(prefix, tokenizer, tmp_path)
    config = load_config(path).config
    prepare()
    from megatron_fp8.data.dataset import build_datasets

    train = build_datasets(config, tokenizer).train
    for number in range(0, 400, 7):
        pieces = sample_pieces(train_blend(config.data), 32, config.training.seed, number)
        expected = [*train[number]["tokens"].tolist(), int(train[number]["labels"][-1])]  # type: ignore[index]
        assert [token for piece in pieces for token in piece.tokens.tolist()] == expected
    code, output, _ = call("sample", path, "--sample", 399, "training.global_batch_size=8")
    assert code == 0
    assert "sample 399, in step 50:" in output
    assert call("sample", path, "--sample", -1)[0] == 2


def test_verify(prefix: str, tokenizer: Tokenizer, call: Call) -> None:
    code, output, _ = call("verify", prefix, "--tokenizer-model", tokenizer.path)
    assert code == 0
    assert "valid: 60 documents" in output
    largest = max(max(document, default=0) for document in decode_token_file(prefix))
    code, output, _ = call("verify", prefix, "--vocab-size", largest)
    assert code == 1
    assert f"holds token id {largest}" in output
    assert call("verify", prefix, "--vocab-size", 0)[0] == 2
    Path(f"{prefix}.bin").write_bytes(Path(f"{prefix}.bin").read_bytes()[:-2])
    code, output, _ = call("verify", prefix)
    assert code == 1
    assert "truncated" in output
    assert call("verify", f"{prefix}-none")[0] == 2


def test_merge_and_split_say_what_they_wrote(prefix: str, call: Call) -> None:
    code, output, _ = call("split", prefix, "--output-prefix", f"{prefix}-s", "--documents", "40,10")
    assert code == 0
    assert f"wrote {prefix}-s_valid.bin and .idx: 10 documents" in output
    assert "left out: 10 documents" in output
    parts = [f"{prefix}-s_train", f"{prefix}-s_valid"]
    code, output, _ = call("merge", *parts, "--output-prefix", f"{prefix}-m")
    assert code == 0
    assert decode_token_file(f"{prefix}-m") == decode_token_file(prefix)[:50]
    code, _, error = call("merge", *parts, "--output-prefix", f"{prefix}-m")
    assert (code, "--overwrite" in error) == (2, True)
    assert call("merge", *parts, "--output-prefix", f"{prefix}-m", "--overwrite")[0] == 0


def test_a_full_disk_is_reported_and_nothing_is_left(prefix: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TokenFileWriter, "add_documents", full)
    code, _, error = call("merge", prefix, "--output-prefix", f"{prefix}-m")
    assert (code, error) == (2, f"merge: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}\n")
    assert not list(Path(prefix).parent.glob("text-m*"))


def test_a_corrupt_length_is_reported(prefix: str, call: Call) -> None:
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    struct.pack_into("<i", content, HEADER.size, -5)
    Path(f"{prefix}.idx").write_bytes(content)
    code, _, error = call("sample", prefix, "--document", 0)
    assert (code, "has -5 tokens: its index is corrupt" in error) == (2, True)


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--split", "a", "not one to three numbers"),
        ("--split", "1,999", "would get none of the 60 documents"),
        ("--documents", "x", "not one to three numbers"),
        ("--documents", "61", "but the file has 60"),
    ],
)
def test_invalid_shares_are_refused(option: str, value: str, reason: str, prefix: str, call: Call) -> None:
    code, _, error = call("split", prefix, "--output-prefix", f"{prefix}-s", option, value)
    assert code == 2
    assert reason in error
    assert not Path(f"{prefix}-s_valid.bin").exists()


def test_the_tool_needs_no_torch(prefix: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name in ("train", "valid"):
        for suffix in (".bin", ".idx"):
            Path(f"{prefix}-half_{name}{suffix}").write_bytes(Path(f"{prefix}{suffix}").read_bytes())
    config = config_for(prefix, tokenizer, tmp_path)
    program = (
        "import sys\n"
        "for name in ('torch', 'transformer_engine', 'megatron.core'): sys.modules[name] = None\n"
        "from tools.data import main\n"
        f"main(['verify', {prefix!r}])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    # A blend needs Megatron Core's compiled helpers, which are loaded without the package around them.
    program = (
        "import sys\n"
        "for name in ('torch', 'transformer_engine'): sys.modules[name] = None\n"
        "from tools.data import main\n"
        f"main(['sample', {str(config)!r}, '--sample', '5'])\n"
        "assert 'megatron.core' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_missing_files_are_reported_at_once(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = [str(tmp_path / name) for name in ("absent", "gone")]
    commands = (["inspect", prefix, *absent], ["verify", prefix, *absent], ["merge", prefix, *absent])
    for command in commands:
        output = ["--output-prefix", str(tmp_path / "out")] if command[0] == "merge" else []
        assert exit_code(main, *command, *output) == 2
        printed = capsys.readouterr()
        assert all(name in printed.err for name in absent), command
        assert ("documents" in printed.out) == (command[0] == "inspect")
    assert not list(tmp_path.glob("out*"))
