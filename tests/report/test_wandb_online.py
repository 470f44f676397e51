"""What arrives at wandb's server: wandb's own client against a server on loopback.

Each series has each step once, whatever happens to the job or to the server in between.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import wandb

from megatron_fp8.config.schema import Config
from megatron_fp8.report.record import METRICS, Recorder, Sink, drop_records_after
from megatron_fp8.report.views import sinks_of_run
from tests.report.wandb_server import KEY, Bucket, WandbServer, wandb_server
from tests.small_run import small_config

SECRET = "the-password-of-the-cluster"


class Nothing:
    """A console that shows nothing."""

    def write(self, record: Any) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with wandb_server() as running:
        monkeypatch.setenv("WANDB_BASE_URL", running.address)
        yield running
        # The client's own process keeps the server's address.
        wandb.teardown()
        assert running.unknown == []


def config_of(**parallel: Any) -> Config:
    return small_config(logging={"wandb_project": "p"}, parallel=parallel)


def opened(directory: Path, iteration: int | None = None, config: Config | None = None) -> Recorder:
    """The views of a run, `iteration`: of the checkpoint that it resumes from."""
    directory.mkdir(exist_ok=True)
    return Recorder(sinks(directory, iteration, config), {SECRET})


def sinks(directory: Path, iteration: int | None, config: Config | None = None) -> Sequence[Sink]:
    return sinks_of_run(config or config_of(), directory, Nothing, iteration)


def train(recorder: Recorder, iterations: Sequence[int], scale: float = 1.0) -> None:
    for iteration in iterations:
        nodes = {f"node/{node}/cpu-percent": float(iteration + node) for node in range(2)}
        recorder.write("train", {"iteration": iteration, "lm loss": scale * iteration, **nodes})


def resumed(directory: Path, iteration: int, config: Config | None = None) -> Recorder:
    """As a job that resumes from a checkpoint of `iteration` opens its record."""
    drop_records_after(directory / METRICS, iteration)
    return opened(directory, iteration, config)


def only(server: WandbServer) -> Bucket:
    (run,) = server.runs.values()
    return run


def test_a_run_arrives_whole_and_without_secrets(server: WandbServer, tmp_path: Path) -> None:
    directory = tmp_path / "big"
    recorder = opened(directory)
    checkpoint = directory / "checkpoints" / "iter_0000005"
    checkpoint.mkdir(parents=True)
    recorder.write("start", {"device": f"mounted with {SECRET}", "parameters": 7})
    train(recorder, range(1, 6))
    recorder.write("validation", {"iteration": 5, "lm loss validation": 2.5})
    spike = {"iteration": 5, "began": 4, "lm loss": 9.0, "limit": 2.0, "median": 1.0, "reason": "loss 9 is above 2"}
    recorder.write("spike", spike)
    saved = {"iteration": 5, "path": str(checkpoint), "bytes": 1, "hold-up-seconds": 0.1, "seconds": 1.0, "removed": []}
    recorder.write("checkpoint", saved)
    recorder.write("end", {"iteration": 5, "seconds": 3.0, "stopped": None})
    recorder.close()
    run = only(server)
    assert run.display_name == "big"
    assert run.series("lm loss") == [(step, float(step)) for step in range(1, 6)]
    assert run.series("lm loss validation") == [(5, 2.5)]
    for node in range(2):
        assert run.series(f"node/{node}/cpu-percent") == [(step, float(step + node)) for step in range(1, 6)]
    assert run.config["start"]["value"]["parameters"] == 7
    assert run.config["model"]["value"]["num_layers"] == 4
    assert SECRET not in run.text
    assert KEY not in run.text
    (alert,) = run.alerts
    assert "loss 9 is above 2" in alert["text"]
    assert {artifact["artifactCollectionName"] for artifact in run.artifacts} == {f"checkpoint-{run.name}"}
    assert run.exit_codes == [0]


def test_a_resume_between_two_records_doubles_and_loses_no_step(server: WandbServer, tmp_path: Path) -> None:
    directory = tmp_path / "big"
    first = opened(directory)
    train(first, range(1, 8))
    # A crash: the record has no end, the checkpoint is of step 5, and the next job has other ranks.
    first.close()
    second = resumed(directory, 5, config_of(tensor_model_parallel_size=2))
    second.write("resume", {"iteration": 5, "checkpoint": "c", "weights only": False, "notes": []})
    train(second, range(6, 11))
    second.close()
    run = only(server)
    assert run.series("lm loss") == [(step, float(step)) for step in range(1, 11)]
    assert run.config["parallel"]["value"]["tensor_model_parallel_size"] == 2
    assert run.display_name == "big"


def test_a_rollback_continues_as_another_run_which_has_everything(server: WandbServer, tmp_path: Path) -> None:
    directory = tmp_path / "big"
    recorder = opened(directory)
    train(recorder, range(1, 9))
    recorder.close()
    drop_records_after(directory / METRICS, 5)
    recorder.reopen(sinks(directory, 5))
    rollback = {"iteration": 5, "from-iteration": 8, "reason": "a spike", "checkpoint": "c", "rewinds": 1}
    skipped = {"first skipped sample": 20, "last skipped sample": 31, "rewinds left": 2, "notes": []}
    recorder.write("rewind", {**rollback, **skipped})
    train(recorder, range(6, 11), scale=10.0)
    recorder.close()
    before, after = server.runs.values()
    assert (before.display_name, after.display_name) == ("big", "big rollback 1")
    assert before.series("lm loss") == [(step, float(step)) for step in range(1, 9)]
    undone = [(step, float(step)) for step in range(1, 6)]
    assert after.series("lm loss") == [*undone, *((step, 10.0 * step) for step in range(6, 11))]
    assert len(after.alerts) == 1
    assert before.alerts == []
    # The next job continues that one.
    third = resumed(directory, 10)
    train(third, [11])
    third.close()
    assert len(server.runs) == 2
    assert [step for step, _ in after.series("lm loss")] == list(range(1, 12))


def test_a_copied_run_directory_is_another_run(server: WandbServer, tmp_path: Path) -> None:
    recorder = opened(tmp_path / "big")
    train(recorder, range(1, 4))
    recorder.close()
    shutil.copytree(tmp_path / "big", tmp_path / "copy")
    copied = resumed(tmp_path / "copy", 3)
    train(copied, [4, 5], scale=10.0)
    copied.close()
    original, copy = server.runs.values()
    assert [step for step, _ in original.series("lm loss")] == [1, 2, 3]
    assert copy.series("lm loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0)]
    assert copy.display_name == "copy"


def longest_write(recorder: Recorder, iterations: Sequence[int]) -> float:
    """Seconds; a step's work is between two records."""
    longest = 0.0
    for iteration in iterations:
        started = time.monotonic()
        train(recorder, [iteration])
        longest = max(longest, time.monotonic() - started)
    return longest


def test_a_slow_server_holds_up_no_record(server: WandbServer, tmp_path: Path) -> None:
    server.delay = 1.0
    recorder = opened(tmp_path / "big")
    checkpoint = tmp_path / "big" / "checkpoints"
    checkpoint.mkdir()
    saved = {"iteration": 3, "path": str(checkpoint), "bytes": 1, "hold-up-seconds": 0.1, "seconds": 1.0, "removed": []}
    longest = longest_write(recorder, range(1, 4))
    recorder.write("checkpoint", saved)
    longest = max(longest, longest_write(recorder, range(4, 30)))
    assert longest < 0.5
    recorder.close()
    assert only(server).series("lm loss") == [(step, float(step)) for step in range(1, 30)]


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True], ids=["refuses", "dies"])
def test_a_server_that_comes_back_gets_every_step_once(dies: bool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with wandb_server() as server:
        port = int(server.address.rpartition(":")[2])
        monkeypatch.setenv("WANDB_BASE_URL", server.address)
        recorder = opened(tmp_path / "big")
        train(recorder, range(1, 4))
        deadline = time.monotonic() + 60
        while (not server.runs or len(only(server).history) < 3) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not dies:
            server.failing = 503
            longest = longest_write(recorder, range(4, 20))
            while server.num_refused == 0 and time.monotonic() < deadline:
                time.sleep(0.1)
            server.failing = 0
            recorder.close()
    if dies:
        longest = longest_write(recorder, range(4, 20))
        with wandb_server(port, server):
            recorder.close()
    wandb.teardown()
    assert longest < 0.5
    assert only(server).series("lm loss") == [(step, float(step)) for step in range(1, 20)]
    assert server.unknown == []
