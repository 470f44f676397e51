"""A checkpoint cannot run anything: foreign pickles in its files are refused, each by the file's name."""

from __future__ import annotations

import pickle
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp8.checkpoint.plain_index import read_plain_index
from tests.checkpoint.training import checkpoint_config, save_on_this_rank, train_on_this_rank
from tests.ranks import RankError, run_on_ranks


class Foreign:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def make_config():
    return checkpoint_config(model={"num_layers": 1}, training={"eval_iters": 0})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    run_on_ranks(1, save_on_this_rank, make_config(), directory, [1])
    return directory / "iter_0000001"


def foreign_pickle(marker: Path) -> bytes:
    buffer = BytesIO()
    torch.save({"innocent": Foreign(marker)}, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def poison_index(checkpoint: Path, marker: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Foreign(marker)))


def poison_index_inside(checkpoint: Path, marker: Path) -> None:
    """A real index with one more thing in it."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = Foreign(marker)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def poison_tensors(checkpoint: Path, marker: Path) -> None:
    """In the place of every tensor that is long enough."""
    content = foreign_pickle(marker)
    for tensor in read_plain_index(checkpoint).values():
        for piece in tensor.pieces:
            if piece.num_bytes >= len(content):
                with (checkpoint / piece.file).open("r+b") as file:
                    file.seek(piece.start)
                    file.write(content)


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        (poison_index, r"\.metadata is refused: it would run pathlib"),
        (poison_index_inside, r"\.metadata is refused: it would run pathlib"),
        (poison_tensors, "Weights only load failed"),
    ],
)
def test_a_foreign_pickle_is_refused_and_not_run(written: Path, tmp_path: Path, poison, message: str) -> None:
    checkpoint, marker = Path(shutil.copytree(written, tmp_path / "iter_0000001")), tmp_path / "ran"
    poison(checkpoint, marker)
    with pytest.raises(RankError, match=message):
        run_on_ranks(1, train_on_this_rank, make_config(), None, checkpoint)
    assert not marker.exists()


def test_the_poison_of_these_tests_works(tmp_path: Path) -> None:
    """Else the refusals above would say nothing."""
    torch.load(BytesIO(foreign_pickle(tmp_path / "ran")), weights_only=False)
    assert (tmp_path / "ran").exists()


def test_a_checkpoint_has_no_pickled_classes_but_in_the_index(written: Path) -> None:
    for tensor in read_plain_index(written).values():
        for piece in tensor.pieces:
            content = (written / piece.file).read_bytes()[piece.start : piece.start + piece.num_bytes]
            loaded = torch.load(BytesIO(content), weights_only=True)
            assert (tuple(loaded.shape), str(loaded.dtype)) == (piece.shape, f"torch.{tensor.dtype}")
