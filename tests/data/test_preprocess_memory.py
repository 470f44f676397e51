"""Ten times the input takes no more memory, in every format."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

SMALL_BYTES, LARGE_BYTES = 8 * 2**20, 80 * 2**20
# Measured: 0 for lines and texts; Parquet's reader holds pages, and the index of a row group.
ALLOWED_BYTES = 24 * 2**20
TEXT = "The quick brown fox jumps over the lazy dog. " * 100


def write_lines(path: Path, number: int) -> None:
    line = json.dumps({"text": TEXT}) + "\n"
    with path.open("w") as stream:
        for _ in range(number):
            stream.write(line)


def write_text_files(folder: Path, number: int) -> None:
    folder.mkdir()
    for index in range(number // 100):
        (folder / f"{index}.txt").write_text(f"{TEXT}\n" * 100)


def write_row_groups(path: Path, number: int) -> None:
    schema = pyarrow.schema([("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        writer.write_table(pyarrow.table({"text": [TEXT] * number}), row_group_size=number // 2)


PROGRAM = """
import resource, sys
from pathlib import Path
from megatron_fp8.prepare.encode import Settings, TokenizerFile
from megatron_fp8.prepare.preprocess import preprocess
from megatron_fp8.prepare.input_files import find_inputs
settings = Settings(TokenizerFile(None, "ByteLevelTokenizer"))
for path in sys.argv[1:]:
    preprocess(find_inputs([path], "auto", ["text"]), path + "-out", settings)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.parametrize(
    ("name", "write"), [("a.jsonl", write_lines), ("texts", write_text_files), ("a.parquet", write_row_groups)]
)
def test_memory_does_not_grow_with_the_input(name: str, write: Callable[[Path, int], None], tmp_path: Path) -> None:
    paths = []
    for size_bytes in (SMALL_BYTES, LARGE_BYTES):
        paths.append(tmp_path / str(size_bytes) / name)
        paths[-1].parent.mkdir()
        write(paths[-1], size_bytes // len(TEXT))
        written = paths[-1].iterdir() if paths[-1].is_dir() else paths[-1:]
        assert sum(path.stat().st_size for path in written) > 0.9 * size_bytes
    command = [sys.executable, "-c", PROGRAM, *map(str, paths)]
    small, large = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert large - small < ALLOWED_BYTES < (LARGE_BYTES - SMALL_BYTES) / 2
