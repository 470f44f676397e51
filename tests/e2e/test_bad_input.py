"""Wrong input ends with exit code 2 and the key, value, origin and remedy, before torch is imported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import Tiny
from tests.e2e.launch import Ended, pretrain

# Of the program's own work: on a loaded machine the wall clock says little.
MOST_CPU_SECONDS = 2.0
IN_FILE = "tiny.yaml:"
ON_COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Case:
    """Arguments after CONFIG that are wrong, and what the message must say: key, value, origin, remedy."""

    name: str
    arguments: tuple[str, ...]
    key: str
    value: str
    origin: str
    remedy: str
    world_size: int = 1

    def __str__(self) -> str:
        return self.name


CASES = [
    Case(
        "unknown key",
        ("training.train_iter=5",),
        "training.train_iter",
        "5",
        ON_COMMAND_LINE,
        "training.train_iters",
    ),
    Case("another program's key", ("fp8.enabled=true",), "fp8.enabled", "true", ON_COMMAND_LINE, "section"),
    Case("wrong type", ("optimizer.lr=fast",), "optimizer.lr", "fast", ON_COMMAND_LINE, "number"),
    Case("wrong choice", ("precision.mode=fp88",), "precision.mode", "fp88", ON_COMMAND_LINE, "fp8"),
    Case(
        "missing data",
        ("data.train_data_path=[nowhere/train]",),
        "data.train_data_path",
        "nowhere/train",
        ON_COMMAND_LINE,
        "tools/preprocess_data.py",
    ),
    Case(
        "missing tokenizer",
        ("data.tokenizer_model=nowhere.json",),
        "data.tokenizer_model",
        "nowhere.json",
        ON_COMMAND_LINE,
        "name an existing tokenizer.json",
    ),
    Case(
        "shape that FP8 refuses",
        ("model.ffn_hidden_size=120",),
        "model.ffn_hidden_size",
        "120",
        ON_COMMAND_LINE,
        "model.ffn_hidden_size=128",
    ),
    Case(
        "heads over ranks", ("model.num_attention_heads=5",), "model.hidden_size", "64", IN_FILE, "model.hidden_size=80"
    ),
    Case(
        "batch arithmetic",
        ("training.micro_batch_size=3",),
        "training.global_batch_size",
        "4",
        IN_FILE,
        "training.global_batch_size=3",
    ),
    Case(
        "world size",
        ("parallel.tensor_model_parallel_size=2",),
        "world_size",
        "3",
        "the number of processes",
        "2 ranks",
        world_size=3,
    ),
    Case(
        "amaxes of the data-parallel group alone",
        ("parallel.tensor_model_parallel_size=2", "precision.amax_reduction=data_parallel"),
        "precision.amax_reduction",
        "data_parallel",
        ON_COMMAND_LINE,
        "precision.amax_reduction=auto",
        world_size=2,
    ),
]


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which importing torch, or anything built on it, ends the program with exit code 99."""
    directory = tmp_path / "no_torch"
    for name in ("torch", "transformer_engine", "megatron"):
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text("import os\nos._exit(99)\n", encoding="utf-8")
    return {"PYTHONPATH": str(directory)}


def assert_refused(ended: Ended, *texts: str) -> None:
    assert ended.code == 2, ended.output
    assert ended.stdout == "", "a mistake goes to standard error"
    assert "Traceback" not in ended.stderr
    for text in texts:
        assert text in ended.stderr, f"{text!r} is missing in:\n{ended.stderr}"
    assert ended.cpu_seconds < MOST_CPU_SECONDS


def test_a_right_config_passes_without_torch(tiny: Tiny, tmp_path: Path, without_torch: dict[str, str]) -> None:
    """Else the tests below could pass for a wrong reason."""
    ended = pretrain(tiny.write_config(tmp_path), "--check", cwd=tmp_path, environment=without_torch)
    assert ended.code == 0, ended.output
    assert "tiny: can run on" in ended.stdout
    started = pretrain(tiny.write_config(tmp_path), cwd=tmp_path, environment=without_torch)
    assert started.code == 99, "a right config goes on to torch"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mistake_is_explained(case: Case, tiny: Tiny, tmp_path: Path, without_torch: dict[str, str]) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": str(case.world_size)} if case.world_size > 1 else {}
    ended = pretrain(tiny.write_config(tmp_path), *case.arguments, cwd=tmp_path, environment={**without_torch, **ranks})
    assert_refused(ended, f"{case.key} = {case.value}", case.origin, "why:", "use:", case.remedy)
    assert not (tmp_path / "runs").exists(), "nothing is made for a run that does not start"


def test_all_mistakes_are_named_at_once(tiny: Tiny, tmp_path: Path, without_torch: dict[str, str]) -> None:
    wrong = ("training.train_iter=5", "optimizer.lr=fast", "precision.mode=fp88")
    ended = pretrain(tiny.write_config(tmp_path), *wrong, cwd=tmp_path, environment=without_torch)
    assert_refused(ended, "3 mistakes", *(text.replace("=", " = ") for text in wrong))


def test_a_mistake_in_a_file_is_named_by_its_line(tiny: Tiny, tmp_path: Path, without_torch: dict[str, str]) -> None:
    path = tiny.write_config(tmp_path)
    lines = path.read_text(encoding="utf-8").splitlines()
    number = lines.index("  seq_length: 32") + 1
    path.write_text("\n".join(lines).replace("  seq_length: 32", "  seq_len: 32"), encoding="utf-8")
    ended = pretrain("tiny.yaml", cwd=tmp_path, environment=without_torch)
    assert_refused(ended, f"model.seq_len = 32  (tiny.yaml:{number})", "model.seq_length")


def test_a_missing_config_is_named(tmp_path: Path, without_torch: dict[str, str]) -> None:
    ended = pretrain("configs/none.yaml", cwd=tmp_path, environment=without_torch)
    assert_refused(ended, "configs/none.yaml", "no such file")


def test_a_broken_base_is_named(tiny: Tiny, tmp_path: Path, without_torch: dict[str, str]) -> None:
    (tmp_path / "child.yaml").write_text("base: parent.yaml\n", encoding="utf-8")
    ended = pretrain("child.yaml", cwd=tmp_path, environment=without_torch)
    assert_refused(ended, "base = parent.yaml  (child.yaml:1)", "no such file")


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_truncated_token_file_is_named(
    suffix: str, tiny: Tiny, tmp_path: Path, without_torch: dict[str, str]
) -> None:
    for name in ("train.bin", "train.idx"):
        content = (tiny.data / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-10] if name.endswith(suffix) else content)
    ended = pretrain(
        tiny.write_config(tmp_path), f"data.train_data_path=[{tmp_path}/train]", cwd=tmp_path, environment=without_torch
    )
    assert_refused(ended, "data.train_data_path = ", f"{tmp_path}/train", "tools/preprocess_data.py")


def test_token_files_of_another_tokenizer_are_named(tiny: Tiny, tmp_path: Path, without_torch: dict[str, str]) -> None:
    """A tokenizer with fewer tokens than the files use: training would read beyond the embedding."""
    tokenizer = json.loads((tiny.data / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"] = {
        token: number for token, number in tokenizer["model"]["vocab"].items() if number < 257
    }
    tokenizer["model"]["merges"] = []
    (tmp_path / "small.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    ended = pretrain(
        tiny.write_config(tmp_path), "data.tokenizer_model=small.json", cwd=tmp_path, environment=without_torch
    )
    assert_refused(ended, "data.train_data_path", "data.valid_data_path", "257")
