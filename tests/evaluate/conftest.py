"""The model that is measured, its text and its exported form. Nothing here may ask the network."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.evaluate.models import model_config, write_tasks, write_text
from tests.hf.our_models import convert, train_and_save
from tests.ranks import run_on_ranks

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")


@dataclass(frozen=True)
class Measured:
    """A run, the FP32 model exported from it, token files `one` and `two`, their documents' texts, tasks."""

    run: Path
    exported: Path
    files: Path
    texts: dict[str, list[str]]
    tasks: Path


@pytest.fixture(scope="session")
def measured_model(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Trained for two steps in FP8 on two ranks, so that nothing fits one rank in FP32 by chance."""
    root = tmp_path_factory.mktemp("measured")
    texts = write_text(root)
    config = model_config(
        root, precision={"mode": "fp8", "fp8_amax_history_len": 4}, parallel={"tensor_model_parallel_size": 2}
    )
    run_on_ranks(2, train_and_save, config, root / "run" / "checkpoints")
    convert("export", root / "run", root / "exported", "--dtype", "fp32")
    (root / "tasks").mkdir()
    write_tasks(root / "tasks")
    os.environ["HF_HOME"] = str(root / "hugging_face")
    return Measured(root / "run", root / "exported", root, texts, root / "tasks")
