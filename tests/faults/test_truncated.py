"""A data file that becomes shorter while a run reads it is named; the process is not killed by a bus error."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_fp8.config.schema import Config
from megatron_fp8.data.token_file import MappedFiles, ShortenedFileError, bin_path, idx_path
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.data.validation import WholeFile
from megatron_fp8.prepare.token_file_writer import TokenFileWriter
from tests.e2e.conftest import Tiny
from tests.e2e.launch import Ended, run

# More than a page, so that there are pages beyond the new end.
NUM_TOKENS = 40_000


def write(prefix: Path, first: int = 1) -> str:
    with TokenFileWriter(prefix, vocab_size=300) as writer:
        for _ in range(100):
            writer.add_documents(np.full(NUM_TOKENS // 100, first, writer.dtype), [NUM_TOKENS // 100])
    return str(prefix)


def read_all(dataset) -> None:
    for index in range(len(dataset)):
        dataset[index]


def test_whole_files(tmp_path: Path) -> None:
    prefix = write(tmp_path / "text")
    read_all(dataset := WholeFile(prefix, 64, 0))
    os.truncate(bin_path(prefix), 5000)
    with pytest.raises(ShortenedFileError, match=r"text\.bin was truncated .* 5000 of 80000 bytes"):
        read_all(dataset)


@pytest.fixture
def datasets(tmp_path: Path) -> Callable[..., object]:
    """Training samples of one file, or of a blend of two."""

    def make(*prefixes: str) -> object:
        from megatron_fp8.device import prepare

        prepare()
        from megatron_fp8.data.dataset import build_datasets

        blend = list(prefixes) if len(prefixes) == 1 else [part for prefix in prefixes for part in ("0.5", prefix)]
        config = Config.model_validate(
            {
                "run": {"name": "test"},
                "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1, "seq_length": 32},
                "training": {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 3000, "eval_iters": 0},
                "optimizer": {"lr": 1e-3},
                "data": {"train_data_path": blend, "tokenizer_type": "ByteLevelTokenizer"},
            }
        )
        return build_datasets(config, Tokenizer.of(config.data)).train

    return make


# Which of the files that a run maps loses its end.
FILES: dict[str, Callable[[Path], Path]] = {
    "tokens": lambda directory: directory / "a.bin",
    "index": lambda directory: directory / "a.idx",
    "samples": lambda directory: next(directory.glob("cache/*/train-0-samples.npy")),
    "shuffle": lambda directory: next(directory.glob("cache/*/train-0-shuffle.npy")),
    "blend": lambda directory: next(directory.glob("cache/*/train-sample.npy")),
}


@pytest.mark.parametrize("which", FILES)
def test_each_file_that_training_maps(which: str, datasets: Callable[..., object], tmp_path: Path) -> None:
    prefixes = [write(tmp_path / "a"), write(tmp_path / "b", 2)][: 2 if which == "blend" else 1]
    dataset = datasets(*prefixes)
    dataset[0]
    path = FILES[which](tmp_path)
    size_bytes = path.stat().st_size
    os.truncate(path, 200)
    with pytest.raises(ShortenedFileError, match=rf"{path.name} was truncated .*: 200 of {size_bytes} bytes"):
        read_all(dataset)


def test_a_file_that_is_replaced_or_removed_is_read_on(datasets: Callable[..., object], tmp_path: Path) -> None:
    """As by a program that prepares the data anew under the same name: the run keeps what it began with."""
    dataset = datasets(write(tmp_path / "a"))
    before = dataset[3]["tokens"].tolist()
    short = TokenFileWriter(tmp_path / "a", vocab_size=300)
    with short as writer:
        writer.add_documents(np.full(3, 7, writer.dtype), [3])
    idx_path(tmp_path / "a").unlink()
    assert dataset[3]["tokens"].tolist() == before


def test_an_empty_set_of_files_is_whole() -> None:
    MappedFiles.under([], [np.zeros(3)]).require_whole()


TRUNCATES = """\
import os
import pretrain
from megatron_fp8.train.state import Pace

step_done = Pace.step_done


def truncate_after_the_second(self):
    step_done(self)
    self.steps_seen = getattr(self, "steps_seen", 0) + 1
    if self.steps_seen == 2:
        os.truncate("data/train.bin", 100)


Pace.step_done = truncate_after_the_second
{more}
if __name__ == "__main__":
    pretrain.main()
"""
UNGUARDED = """\
from megatron_fp8.data.token_file import MappedFiles
MappedFiles.require_whole = lambda self: None
"""


def run_and_truncate(tmp_path: Path, more: str) -> Ended:
    prefix = tmp_path / "data" / "train"
    prefix.parent.mkdir()
    write(prefix)
    Tiny(tmp_path / "data").write_config(tmp_path, mode="bf16")
    script = tmp_path / "truncates.py"
    script.write_text(TRUNCATES.format(more=more), encoding="utf-8")
    options = ["data.tokenizer_model=null", "data.tokenizer_type=ByteLevelTokenizer", "data.valid_data_path=[]"]
    return run([sys.executable, script, "tiny.yaml", "training.eval_iters=0", *options], tmp_path)


@pytest.mark.slow
def test_a_run_ends_with_the_name_of_the_file(tmp_path: Path) -> None:
    ended = run_and_truncate(tmp_path, "")
    assert ended.code == 2, ended.output
    assert "train.bin was truncated while the run reads it: 100 of 80000 bytes" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_between_the_look_and_the_read_the_signal_leaves_the_stack_of_the_reader(tmp_path: Path) -> None:
    """What a look at the length cannot rule out, as on a network file system that tells lengths late."""
    ended = run_and_truncate(tmp_path, UNGUARDED)
    assert ended.code == -signal.SIGBUS, ended.output
    assert "Fatal Python error: Bus error" in ended.stderr
    assert "in _read_step" in ended.stderr
