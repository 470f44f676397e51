"""A wandb server that refuses or never answers neither stops nor holds up a run: wandb's own client, a local port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.report.guarded import Guarded, InThread
from megatron_fp8.report.record import METRICS, read_records
from tests.small_run import small_config

NUM_RECORDS = 60


@contextmanager
def server(answers: bool) -> Iterator[int]:
    """A port on which connections are accepted and nothing is said, or at which nobody listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if answers:
            listening.listen(64)
        yield listening.getsockname()[1]


class View:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.records: list[Mapping[str, Any]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def test_records_wait_for_a_view_that_opens_beside_training_and_none_is_lost() -> None:
    answered, view, said = threading.Event(), View(), []

    def open_view(kept: int):
        answered.wait()
        return view, -1

    beside = InThread(Guarded("the view", open_view, "advice", say=said.append))
    for iteration in range(5):
        beside.write({"event": "train", "iteration": iteration})
    assert view.records == []
    answered.set()
    beside.close()
    assert [record["iteration"] for record in view.records] == [0, 1, 2, 3, 4]
    assert said == []


def test_a_view_that_does_not_open_is_said_once_and_tried_again() -> None:
    tries, view, said = [], View(), []

    def open_view(kept: int):
        tries.append(kept)
        if len(tries) < 3:
            raise TimeoutError("no answer")
        return view, -1

    beside = InThread(Guarded("the view", open_view, "advice", say=said.append))
    for iteration in range(100):
        beside.write({"event": "train", "iteration": iteration})
    beside.close()
    assert len(tries) == 3
    assert [record["iteration"] for record in view.records] == list(range(100))
    assert len(said) == 2
    assert "TimeoutError: no answer; training goes on" in said[0]
    assert "works again" in said[1]


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, True], ids=["refuses", "never answers"])
def test_wandbs_client(answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """No record takes longer than the disk does; the record is whole; one line says what is wrong, one what is lost."""
    from megatron_fp8.report import wandb_sink
    from megatron_fp8.report.views import sinks_of_run

    monkeypatch.setattr(wandb_sink, "_MOST_SECONDS_TO_START", 5.0)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    config = small_config(logging={"wandb_project": "tests"})
    with server(answers) as port:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        sinks = sinks_of_run(config, tmp_path, View, None)
        longest = 0.0
        for iteration in range(NUM_RECORDS):
            started = time.monotonic()
            for sink in sinks:
                sink.write({"event": "train", "iteration": iteration, "lm loss": 1.0, "time": 1.0})
            longest = max(longest, time.monotonic() - started)
            # As a step does, so that the client has its time meanwhile.
            time.sleep(0.2)
        for sink in sinks:
            sink.close()
    # The client's own limit is not below 5 s.
    assert longest < 4.0
    assert len(list(read_records(tmp_path / METRICS))) == NUM_RECORDS
    said = capfd.readouterr().err
    assert said.count("wandb failed: ") == 1
    assert "training goes on, and it is tried again" in said
