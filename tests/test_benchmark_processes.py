"""Processes of the benchmarks: what they send arrives, and one that dies takes no other along."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

import pytest
from benchmarks.processes import Job, JobError, run_jobs

HERE = "tests.test_benchmark_processes"


def send_or_die(connection: Connection, value: int) -> None:
    """Send `value` twice; in between a negative one kills the process, and 0 is an error."""
    connection.send(value)
    if value < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    connection.send(value * value // value)


def rank_1_dies(connection: Connection) -> None:
    """Rank 0 waits for ever."""
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 has had enough")
    connection.recv()


def wait_for_ever(connection: Connection) -> None:
    """Send nothing."""
    print("waiting", flush=True)
    connection.recv()


def environment(connection: Connection) -> None:
    """Send what a rank finds, when asked."""
    connection.recv()
    connection.send((os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"]))


@pytest.mark.parametrize("num_jobs", [1, 3])
def test_a_process_that_dies_takes_no_other_along(num_jobs: int) -> None:
    sent: dict[int, list[object]] = {index: [] for index in range(4)}
    for index, message in run_jobs([(f"{HERE}:send_or_die", value) for value in (-1, 2, 0, 3)], num_jobs):
        sent[index].append(message)
    assert sent[1] == [2, 2]
    assert sent[3] == [3, 3]
    killed, failed = sent[0][-1], sent[2][-1]
    assert isinstance(killed, JobError)
    assert killed.code == -signal.SIGKILL
    assert isinstance(failed, JobError)
    assert failed.code == 1
    assert "ZeroDivisionError" in failed.log


def test_ranks_answer_in_their_order() -> None:
    with Job(f"{HERE}:environment", num_ranks=2, num_threads=3) as job:
        assert job.ask("") == [("0", "2", "3"), ("1", "2", "3")]


def test_a_rank_that_fails_ends_the_wait_for_the_others() -> None:
    with pytest.raises(JobError, match="rank 1 has had enough"), Job(f"{HERE}:rank_1_dies", num_ranks=2) as job:
        job.receive()


def test_a_process_that_sends_nothing_ends_the_wait() -> None:
    with pytest.raises(JobError, match=r"nothing for 0\.1 s"), Job(f"{HERE}:wait_for_ever") as job:
        job.receive(timeout=0.1)
