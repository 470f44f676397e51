"""A whole run over documents kept apart; files in which nothing says where a document ends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_fp8.prepare.token_file_writer import TokenFileWriter
from tests.e2e.conftest import TRAIN_ITERS, Tiny
from tests.e2e.launch import pretrain, torchrun

APART = ("data.reset_attention_mask=true", "data.reset_position_ids=true", "data.eod_mask_loss=true")


@pytest.mark.slow
def test_a_run_over_documents_kept_apart_learns(tiny: Tiny, tmp_path: Path) -> None:
    """FP8, on two sequence-parallel ranks."""
    ended = torchrun(2, tiny.write_config(tmp_path, tp=2), *APART, cwd=tmp_path)
    assert ended.code == 0, ended.output
    records = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["lm loss"] for record in map(json.loads, records) if record["event"] == "train"]
    assert len(losses) == TRAIN_ITERS
    assert losses[-1] < losses[0] - 0.5


def test_files_without_ends_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "endless", vocab_size=300) as writer:
        writer.add_documents(np.full(400, 7, dtype=writer.dtype), [200, 200])
    config = tiny.write_config(tmp_path)
    path = f"data.train_data_path=[{tmp_path}/endless]"
    ended = pretrain(config, path, "data.reset_attention_mask=true", cwd=tmp_path)
    assert ended.code == 2, ended.output
    assert "data.reset_attention_mask = true" in ended.stderr
    assert "of 2 documents" in ended.stderr
    assert "--append-eod" in ended.stderr
    assert not (tmp_path / "runs").exists()
