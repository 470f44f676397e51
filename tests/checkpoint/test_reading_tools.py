"""A tool's checkpoint stays until the tool has ended, although the run that wrote it goes on and removes older ones."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.checkpoint.manifest import Manifest, write_sums
from megatron_fp8.checkpoint.saved_model import kept_checkpoint
from megatron_fp8.commands import checkpoint as checkpoint_tool
from megatron_fp8.commands import evaluate, generate, lm_eval
from megatron_fp8.errors import BadInputError
from megatron_fp8.faults import failure_report
from megatron_fp8.hf import export

# Of each tool: its arguments beside the run, and what looks into the checkpoint or needs what it lacks.
MODEL_TOOLS = {
    evaluate: ([], ("read_saved_model", "model_tokenizer", "evaluation_files")),
    generate: ([], ("_prepare",)),
    lm_eval: (["--tasks", "arc_easy"], ("read_saved_model", "model_tokenizer", "_require_lm_eval")),
}


class Worked(Exception):
    """The tool has got to its work."""


class Run:
    """A run that goes on: it keeps one checkpoint beside those that others read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directory = CheckpointDirectory(path / "checkpoints")
        self.save(10)

    def save(self, iteration: int) -> list[int]:
        """Save a checkpoint; the iterations that are removed then."""
        path = self.directory.begin(iteration)
        (path / "data").write_text("content", encoding="utf-8")
        write_sums(path, 0, ["data"])
        self.directory.commit(Manifest(iteration, "", {}, {"consumed_samples": 0}, {}))
        return self.directory.prune(keep_last=1, retain_interval=None)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "small")


@pytest.mark.parametrize("tool", MODEL_TOOLS, ids=lambda tool: tool.__name__.rpartition(".")[2])
def test_a_model_s_checkpoint_stays_while_a_tool_works_on_it(
    run: Run, tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, looks = MODEL_TOOLS[tool]
    removed = []

    def working(*_: object) -> None:
        removed.append(run.save(20))
        raise Worked

    for name in looks:
        monkeypatch.setattr(tool, name, lambda *_: None)
    monkeypatch.setattr(failure_report, "run_reporting", working)
    with pytest.raises(Worked):
        tool.main([str(run.path), *arguments])
    assert removed == [[]]
    assert run.save(30) == [10, 20]


@pytest.mark.parametrize("command", ["verify", "verify one", "inspect", "diff"])
def test_a_checkpoint_stays_while_it_is_looked_at(run: Run, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = []

    def look(*_: object, **__: object) -> list[str]:
        removed.append(run.save(20))
        raise Worked

    name, _, one = command.partition(" ")
    monkeypatch.setattr(checkpoint_tool, "read_plain_index" if name == "inspect" else "find_corruption", look)
    monkeypatch.setattr("megatron_fp8.checkpoint.difference.differences", look)
    path = str(run.directory.path(10) if one else run.path)
    with pytest.raises(Worked):
        checkpoint_tool.main([name, path, *([path] if name == "diff" else [])])
    assert removed == [[]]
    assert run.save(30) == [10, 20]


def test_a_checkpoint_stays_while_it_is_exported(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = []

    def look(*_: object) -> None:
        removed.append(run.save(20))
        raise Worked

    monkeypatch.setattr(export, "read_config", look)
    with pytest.raises(Worked):
        export.export_checkpoint(run.path, tmp_path / "folder", export.ExportSettings(), lambda *_: None)
    assert removed == [[]]
    assert run.save(30) == [10, 20]


def test_one_that_is_removed_before_it_is_kept_gives_way_to_the_newer_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_fp8.checkpoint import saved_model

    find, found = saved_model.find_checkpoint, []

    def find_and_lose(path: Path, iteration: int | None) -> Path:
        found.append(find(path, iteration))
        if len(found) == 1:
            assert run.save(20) == [10]
        return found[-1]

    monkeypatch.setattr(saved_model, "find_checkpoint", find_and_lose)
    with kept_checkpoint(run.path) as checkpoint:
        assert checkpoint == run.directory.path(20)
    with pytest.raises(BadInputError, match="no checkpoint of iteration 10"), kept_checkpoint(run.path, 10):
        pass
