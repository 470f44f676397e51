"""The Slurm script under stand-ins for Slurm's and torch's commands: when it queues the job again, and when not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docker" / "slurm" / "pretrain.sbatch"
# What each command does; `srun` passes signals on to the processes of its step, as Slurm's does.
COMMANDS = {
    "scontrol": """
case $1 in
show) echo node-a; echo node-b ;;
requeue) echo "$2" > "$TEST/requeued" ;;
esac
""",
    "srun": """
while [[ $1 == --* ]]; do shift; done
setsid "$@" &
step=$!
trap 'kill -USR1 -- -$step' USR1
trap 'kill -TERM -- -$step' TERM
code=0
while true; do
    code=0
    wait $step || code=$?
    kill -0 $step 2>/dev/null || break
done
exit $code
""",
    # Dies of USR1 unless it is ignored, as torchrun does, while a rank of it handles the signal.
    "torchrun": """
echo "$@" >> "$TEST/torchrun-calls"
if [[ $* == *megatron_fp8.doctor* ]]; then exit "${DOCTOR_CODE:-0}"; fi
python3 "$TEST/rank.py" || exit 1
""",
}
RANK = """
import json, os, pathlib, signal, sys
test, what = pathlib.Path(os.environ["TEST"]), os.environ["WHAT"]
metrics = test / "runs" / "first" / "metrics.jsonl"
metrics.parent.mkdir(parents=True, exist_ok=True)
def end(stopped):
    with metrics.open("a") as file:
        file.write(json.dumps({"event": "end", "iteration": 3, "stopped": stopped}) + chr(10))
if what == "waits for a signal":
    signals = {signal.SIGUSR1, signal.SIGTERM}
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    # The batch script is told as Slurm tells it: the shell alone, not the step.
    os.kill(int((test / "batch").read_text()), getattr(signal, os.environ["SENT"]))
    told = signal.Signals(signal.sigwait(signals)).name
    if "EARLY" in os.environ:
        sys.exit(1)
    end(f"signal {told}")
    sys.exit(75)
if what == "fails":
    sys.exit(1)
end(None)
"""


def submit(tmp_path: Path, what: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script as Slurm would; `what`: what training does."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in COMMANDS.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{text}", encoding="utf-8")
        (commands / name).chmod(0o755)
    (tmp_path / "rank.py").write_text(RANK, encoding="utf-8")
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "pretrain",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NNODES": "2",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "VENV": str(tmp_path / "venv"),
        "CONFIG": "configs/x.yaml",
        "RUN_NAME": "first",
        "TEST": str(tmp_path),
        "WHAT": what,
        "PATH": f"{commands}:{os.environ['PATH']}",
    }
    started = f'echo $$ > "{tmp_path}/batch"; exec bash "{SCRIPT}" training.train_iters=3'
    return subprocess.run(
        ["bash", "-c", started], env={**job, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "torchrun-calls").read_text(encoding="utf-8").splitlines()


def test_a_run_that_is_done_is_not_queued_again(tmp_path: Path) -> None:
    ended = submit(tmp_path, "is done")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not (tmp_path / "requeued").exists()
    doctor, training = calls(tmp_path)
    assert "-m megatron_fp8.doctor" in doctor
    assert "--nnodes=2 --nproc-per-node=8 --max-restarts=0" in training
    assert "--rdzv-endpoint=node-a:24711" in training
    assert training.endswith(f"run.root={tmp_path}/runs run.name=first --resume=auto training.train_iters=3")


@pytest.mark.parametrize("signal_name", ["SIGUSR1", "SIGTERM"])
def test_a_run_that_was_told_to_stop_is_queued_again(tmp_path: Path, signal_name: str) -> None:
    ended = submit(tmp_path, "waits for a signal", SENT=signal_name)
    assert (tmp_path / "requeued").read_text(encoding="utf-8").strip() == "4711", ended.stdout + ended.stderr
    assert "stopped; queued again" in ended.stdout


def test_a_run_that_is_told_before_it_can_save_is_queued_again(tmp_path: Path) -> None:
    ended = submit(tmp_path, "waits for a signal", SENT="SIGUSR1", EARLY="1")
    assert (tmp_path / "requeued").exists(), ended.stdout + ended.stderr


def test_a_run_that_stops_time_and_again_is_not_queued_for_ever(tmp_path: Path) -> None:
    ended = submit(tmp_path, "waits for a signal", SENT="SIGUSR1", SLURM_RESTART_COUNT="2", MAX_REQUEUES="2")
    assert ended.returncode == 75
    assert not (tmp_path / "requeued").exists()


def test_a_failure_is_not_queued_again_even_after_a_start_that_was_stopped(tmp_path: Path) -> None:
    metrics = tmp_path / "runs" / "first" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text('{"event": "end", "stopped": "signal SIGUSR1"}\n', encoding="utf-8")
    os.utime(metrics, (1, 1))
    ended = submit(tmp_path, "fails")
    assert ended.returncode == 1
    assert not (tmp_path / "requeued").exists()
    assert "failed with code 1" in ended.stdout


def test_a_fault_of_the_machine_keeps_training_from_starting(tmp_path: Path) -> None:
    ended = submit(tmp_path, "is done", DOCTOR_CODE="1")
    assert ended.returncode == 1
    assert len(calls(tmp_path)) == 1
    assert "the doctor found a fault" in ended.stdout


def test_a_config_has_to_be_named(tmp_path: Path) -> None:
    ended = submit(tmp_path, "is done", CONFIG="")
    assert ended.returncode != 0
    assert "set CONFIG" in ended.stderr
