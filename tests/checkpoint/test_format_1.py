"""A checkpoint of format 1, with Megatron's `common.pt`, as this project's program wrote it under Megatron Core 0.16.1.

`format_1/checkpoint.tar.xz`: three FP8 steps of one layer on two tensor-parallel ranks, weights in FP8.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_fp8.checkpoint.plain_index import read_plain_index
from megatron_fp8.checkpoint.saved_model import read_config
from megatron_fp8.commands import checkpoint as tool
from megatron_fp8.config.schema import ParallelConfig
from tests.checkpoint import training
from tests.checkpoint.test_reshard import pieces_and_scaling, scaling, whole
from tests.checkpoint.training import Trained, train_on_this_rank
from tests.command_line import exit_code
from tests.ranks import run_on_ranks

ARCHIVE = Path(__file__).parent / "format_1" / "checkpoint.tar.xz"
STEPS, VOCAB_SIZE = 3, 64


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("format_1")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    assert (directory / f"iter_{STEPS:07d}" / "common.pt").exists()
    return directory


def go_on(config: Any, checkpoint: Path) -> Trained:
    training.VOCAB_SIZE = VOCAB_SIZE
    return train_on_this_rank(config, None, checkpoint, probe=pieces_and_scaling)


@pytest.mark.parametrize(("world_size", "parallel"), [(2, {"tensor_model_parallel_size": 2}), (2, {}), (1, {})])
def test_every_element_is_taken_over(written: Path, world_size: int, parallel: dict[str, Any]) -> None:
    checkpoint = written / f"iter_{STEPS:07d}"
    saved = read_config(checkpoint)
    longer = saved.training.model_copy(update={"train_iters": STEPS + 1})
    config = saved.model_copy(update={"parallel": ParallelConfig(**parallel), "training": longer})
    ranks = run_on_ranks(world_size, go_on, config, checkpoint)
    # By torch's own loader.
    stored = {
        name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for name, t in read_plain_index(checkpoint).items()
    }
    dcp.load(stored, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    loaded = {name: value.cpu() for name, value in whole(ranks, config.model.activation).items()}
    assert {name.replace(" ", ".", 1) for name in loaded} == {
        name for name in stored if name.startswith(("master.", "exp_avg"))
    }
    wrong = []
    for name, value in loaded.items():
        expected = stored[name.replace(" ", ".", 1)]
        # The padding of the vocabulary belongs to the layout.
        if not torch.equal(value[: len(expected)], expected) or value[len(expected) :].any():
            wrong.append(name)
    assert wrong == []
    assert any(value.any() for name, value in loaded.items() if name.startswith("exp_avg_sq"))
    for name, value in scaling(ranks).items():
        assert torch.equal(value.cpu().reshape(-1), stored[f"precision.{name}"].reshape(-1)), name
    assert ranks[0].series()


def test_tools_read_it(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(tool.main, "verify", written) == 0
    assert exit_code(tool.main, "inspect", written) == 0
    assert "megatron-core 0.16.1" in capsys.readouterr().out
    assert exit_code(tool.main, "diff", written, written) == 0
