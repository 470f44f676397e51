"""How a run ends that cannot go on: soon, with a non-zero exit code, the cause last."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.conftest import Tiny
from tests.e2e.launch import pretrain, torchrun

MOST_SECONDS = 30
# Patches one rank only, before the product has imported torch.
FAILS_ON_RANK_1 = """\
import os
import time

import pretrain
from megatron_fp8.train.state import Pace

step_done = Pace.step_done


def fail_on_the_third(self):
    step_done(self)
    self.steps_seen = getattr(self, "steps_seen", 0) + 1
    if os.environ["RANK"] == "1" and self.steps_seen == 3:
        with open("failed_at", "w") as file:
            file.write(str(time.time()))
        raise ValueError("the third step was one too many")


Pace.step_done = fail_on_the_third
if __name__ == "__main__":
    pretrain.main()
"""


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback_last(tiny: Tiny, tmp_path: Path) -> None:
    """The other rank waits in a collective of the next step, for ever if nobody ends it."""
    tiny.write_config(tmp_path, tp=2)
    script = tmp_path / "fails_on_rank_1.py"
    script.write_text(FAILS_ON_RANK_1, encoding="utf-8")
    ended = torchrun(2, "tiny.yaml", cwd=tmp_path, script=script)
    assert ended.code == 1, ended.output
    failed_at = float((tmp_path / "failed_at").read_text(encoding="utf-8"))
    assert ended.ended_at - failed_at < MOST_SECONDS
    last = ended.stderr[ended.stderr.rindex("Traceback (most recent call last)") :]
    assert "ValueError: the third step was one too many" in last, ended.output
    assert "rank 1 failed" in ended.stderr
    # What was written until then is whole.
    lines = (tmp_path / "runs" / "tiny" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["event"] for line in lines][-1] in ("train", "validation", "fp8", "norms", "failure")


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_iteration(tiny: Tiny, tmp_path: Path) -> None:
    """A learning rate beyond all measure: the second step computes with weights that overflow."""
    tiny.write_config(tmp_path)
    ended = pretrain(
        "tiny.yaml", "optimizer.lr=1e36", "optimizer.weight_decay=0", "optimizer.lr_warmup_iters=0", cwd=tmp_path
    )
    assert ended.code == 1, ended.output
    what = "grad-norm is nan at iteration 2 (samples 4 to 7); NaN or infinity on rank 0"
    assert what in ended.stderr, ended.output
    assert "iteration 1/6" in ended.stdout
    assert "iteration 2/6" not in ended.stdout


def test_a_backend_that_this_machine_lacks_ends_with_one_message(tiny: Tiny, tmp_path: Path) -> None:
    """Known only once the device is: exit code 2 all the same, and nothing is written."""
    tiny.write_config(tmp_path, mode="bf16")
    ended = pretrain("tiny.yaml", "parallel.distributed_backend=nccl", cwd=tmp_path)
    assert ended.code == 2, ended.output
    assert "parallel.distributed_backend = nccl" in ended.stderr
    assert "distributed_backend=auto" in ended.stderr
    assert "Traceback" not in ended.output
    assert not (tmp_path / "runs").exists()
