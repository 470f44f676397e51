"""Nothing in the README can rot: its commands run (those that train, in a shorter form), its links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from torch.distributed.run import parse_args as parse_torchrun

from megatron_fp8.faults.exit_codes import ExitCode
from megatron_fp8.report.record import JsonLines
from tests.e2e.conftest import SENTENCE, Tiny
from tests.e2e.launch import ROOT, run

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
# Of the longest sequence among the configs that the README names, with some to spare.
NUM_WORDS = 12_000


def blocks(language: str) -> list[str]:
    """The README's fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Every shell command of the README, as words."""
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def shortened(words: list[str]) -> list[str] | None:
    """What to run for a command, itself where that takes seconds; None: nothing is left to run."""
    program, *arguments = words
    if program == "make":
        return ["make", "--dry-run", *arguments]
    if program == "python":
        return [sys.executable, *arguments]
    if program == "torchrun":
        launch = parse_torchrun(arguments)
        # `--nnodes` may be a range, and is one by default.
        world_size = int(launch.nnodes.split(":")[-1]) * int(launch.nproc_per_node)
        return [
            sys.executable,
            launch.training_script,
            *launch.training_script_args,
            "--check",
            "--world-size",
            str(world_size),
        ]
    if words == ["source", ".venv/bin/activate"]:
        assert "VENV := .venv\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
        return None
    raise AssertionError(f"no way to check the README's command {shlex.join(words)}; give it one here")


@pytest.fixture
def checkout(tiny: Tiny, tmp_path: Path) -> Path:
    """What a person has after `make train`, and texts and a tokenizer of their own."""
    for name in ("Makefile", "configs", "locks", "megatron_fp8", "pretrain.py", "pyproject.toml", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(tiny.data, tmp_path / "data" / "quickstart")
    (tmp_path / "data" / "llama").mkdir()
    shutil.copy(tiny.data / "tokenizer.json", tmp_path / "data" / "llama")
    text = " ".join((SENTENCE.split() * NUM_WORDS)[:NUM_WORDS])
    for name in ("train.jsonl", "valid.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": text}) + "\n", encoding="utf-8")
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    metrics = JsonLines(tmp_path / "runs" / "quickstart" / "metrics.jsonl")
    for iteration in (10, 20):
        record = {"iteration": iteration, "lm loss": 4.0, "learning-rate": 1e-3, "tokens-per-second": 100.0}
        metrics.write({"event": "train", **record})
    metrics.close()
    return tmp_path


def test_every_command_works(checkout: Path) -> None:
    """In their order: later ones read what earlier ones wrote."""
    found = commands()
    assert {words[0] for words in found} == {"make", "source", "python", "torchrun"}, "the blocks are found"
    for words in found:
        command = shortened(words)
        # The quickstart's name is taken by the run that was just shown.
        if command is not None:
            ended = run(command, cwd=checkout)
            assert ended.code == 0, f"{shlex.join(words)}\n{ended.output}"
    assert "plotly" in (checkout / "runs" / "quickstart" / "report.html").read_text(encoding="utf-8")


def test_the_mistake_is_shown_as_it_is(checkout: Path) -> None:
    (block,) = [block for block in blocks("text") if block.startswith("$ python pretrain.py")]
    command, _, expected = block.replace("\\\n", " ").partition("\n")
    ended = run([sys.executable, *shlex.split(command)[2:]], cwd=checkout)
    assert ended.code == 2, ended.output
    # Long lines are folded in the README.
    assert ended.stderr.split() == expected.split()


def test_exit_codes_are_the_programs() -> None:
    rows = re.findall(r"^\| (\d+) \|", README, flags=re.MULTILINE)
    assert [int(row) for row in rows] == [int(code) for code in ExitCode]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    """`train/loop.py` and the like, relative to the repository or to the package."""
    text = document.read_text(encoding="utf-8")
    names = set(re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)`", text))
    names -= set(re.findall(r"[Ss]aved as `(.*?)`", text))  # a program that the page itself shows
    missing = [name for name in names if not any((base / name).exists() for base in (ROOT, ROOT / "megatron_fp8"))]
    assert missing == []
