"""A job that hangs ends within its limit, and the rank that held it up is named with its step and its stack.

Ranks here are processes of a small program around the watchdog: they meet in a collective each step, as in training.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megatron_fp8.monitors.hang import Hang, Status, find_hang
from megatron_fp8.monitors.heartbeat import Heartbeat, Phase
from tests.e2e.launch import clean_environment

LIMIT_SECONDS = 1.5
# The limit, both looks, the time left to the cause, and what a busy machine adds.
MOST_SECONDS = 90.0
PROGRAM = """\
import ctypes
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from megatron_fp8.monitors.heartbeat import Heartbeat, Phase
from megatron_fp8.monitors import watchdog
from megatron_fp8.monitors.watchdog import Limits, Watchdog

watchdog.SECONDS_FOR_THE_CAUSE = 3.0
rank, world_size, way, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
culprit = world_size - 1
store = dist.FileStore(f"{directory}/store", world_size)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
heartbeat = Heartbeat()


def sleeps_for_ever():
    threading.Event().wait()


def waits_in_c():
    ctypes.CDLL(None).pause()


def holds_the_interpreter():
    ctypes.PyDLL(None).pause()


def is_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def loops_for_ever():
    while True:
        pass


def all_wait_for_each_other():
    dist.all_reduce(torch.ones(1), group=pair)


def tell(hang):
    with open(f"{directory}/told{rank}", "w") as file:
        file.write(hang.to_json())


class FullLaunchQueue:
    # A device that works on a collective which others never enter, and takes no more launches: the host stands in the
    # launch, in C, as in `cudaLaunchKernel`. `answers`: whether the driver can be asked then.

    def __init__(self, answers):
        self.full = False
        self.answers = answers

    def launch(self):
        self.full = True
        if way.endswith("interpreter held"):
            holds_the_interpreter()
        waits_in_c()

    def is_idle(self):
        if self.full and not self.answers:
            waits_in_c()
        return not self.full


queue = FullLaunchQueue(answers=way != "full launch queue, driver locked")
pair = dist.new_group([0, culprit])
limits = Limits(%(limit)s, None)
with Watchdog(heartbeat, store, rank, world_size, limits, queue.is_idle, tell):
    for iteration in range(1, 7):
        heartbeat.enter(Phase.DATA, iteration)
        if way == "is slow, as all" and iteration == 4:
            for _ in range(12):
                time.sleep(limits.seconds / 4)
                heartbeat.enter(Phase.EVALUATION)
        elif iteration == 4 and rank == culprit and way in globals():
            globals()[way]()
        elif iteration == 4 and way.startswith("full launch queue"):
            if rank == culprit:
                sleeps_for_ever()
            heartbeat.enter(Phase.FORWARD_BACKWARD)
            queue.launch()
        heartbeat.enter(Phase.FORWARD_BACKWARD)
        dist.all_reduce(torch.ones(4))
        heartbeat.step_done()
        if way == "saves" and iteration == 3:
            heartbeat.enter(Phase.CHECKPOINT)
            time.sleep(4 * limits.seconds)
    print("all steps done")
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Job:
    """How its ranks ended: codes, what they wrote, what each told, seconds."""

    codes: list[int]
    errors: list[str]
    hangs: list[Hang | None]
    reports: list[str]
    seconds: float


def run_job(way: str, directory: Path, world_size: int = 2) -> Job:
    program = directory / "program.py"
    program.write_text(PROGRAM % {"limit": LIMIT_SECONDS}, encoding="utf-8")
    started = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(world_size), way, directory],
            env=clean_environment({"TORCHELASTIC_ERROR_FILE": str(directory / f"error{rank}")}),
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(world_size)
    ]
    errors, codes = [""] * world_size, [0] * world_size
    try:
        # The culprit is last; one that is stopped does not end by itself, its launcher kills it, as one that is held.
        mute = {"is_stopped": 1, "holds_the_interpreter": 1, "full launch queue, interpreter held": 0}.get(way)
        for rank, process in sorted(enumerate(ranks), key=lambda item: item[0] == mute):
            if rank == mute:
                process.kill()
            errors[rank] = process.communicate(timeout=MOST_SECONDS)[1]
            codes[rank] = process.returncode
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    told = [directory / f"told{rank}" for rank in range(world_size)]
    reports = [directory / f"error{rank}" for rank in range(world_size)]
    return Job(
        codes,
        errors,
        [Hang.from_json(path.read_text(encoding="utf-8")) if path.exists() else None for path in told],
        [path.read_text(encoding="utf-8") if path.exists() else "" for path in reports],
        time.monotonic() - started,
    )


@pytest.mark.parametrize(
    "way",
    [
        "waits_in_c",
        "is_stopped",
        pytest.param("sleeps_for_ever", marks=pytest.mark.slow),
        pytest.param("loops_for_ever", marks=pytest.mark.slow),
        pytest.param("holds_the_interpreter", marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_hangs_is_named_with_its_step_and_stack(way: str, tmp_path: Path) -> None:
    job = run_job(way, tmp_path)
    silent = way in ("is_stopped", "holds_the_interpreter")
    hang = job.hangs[0]
    assert hang is not None, job.errors
    assert hang.culprits == (1,)
    assert hang.kind == ("silent" if silent else "still")
    if not silent:
        assert (hang.iteration, hang.phase) == (4, Phase.DATA)
    # The last word of one that is silent may be from any step before: these take milliseconds.
    assert hang.iteration <= 4
    assert f"{hang.phase.value}, since 2" in hang.text
    assert ("(its last report)" in hang.text) == silent
    assert job.codes[0] == 1
    # Who the launcher takes for the cause: the earliest report.
    speaker = 0 if silent else 1
    assert hang.speaker == speaker
    assert "hang detected: rank 1" in json.loads(job.reports[speaker])["message"]["message"]
    if silent:
        assert job.codes[1] == -signal.SIGKILL
        assert "no stack: its process does not respond" in hang.text
    else:
        assert job.codes[1] == 1
        assert f"in {way}" in hang.text
        times = [int(json.loads(report)["message"]["extraInfo"]["timestamp"]) for report in job.reports if report]
        # Gloo may have ended the other one before its time had come.
        assert len(times) == 1 or times[1] < times[0]


@pytest.mark.parametrize(
    "way",
    [
        "full launch queue, driver locked",
        pytest.param("full launch queue", marks=pytest.mark.slow),
        pytest.param("full launch queue, interpreter held", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_stands_in_a_launch_is_not_named_beside_the_culprit(way: str, tmp_path: Path) -> None:
    """It is in no line that says so, in a phase as far as the culprit's, and has stood still as long."""
    job = run_job(way, tmp_path)
    assert job.codes == [-signal.SIGKILL if way.endswith("held") else 1, 1]
    hang = job.hangs[1]
    assert hang is not None, job.errors
    assert (hang.kind, hang.culprits, hang.iteration, hang.phase) == ("still", (1,), 4, Phase.DATA)
    assert "in sleeps_for_ever" in hang.text


@pytest.mark.slow
@pytest.mark.parametrize("way", ["nothing", "is slow, as all", "saves"])
def test_a_job_that_works_is_left_alone(way: str, tmp_path: Path) -> None:
    """A long evaluation moves all the time; a checkpoint may take long."""
    job = run_job(way, tmp_path)
    assert job.codes == [0, 0], job.errors
    assert job.hangs == [None, None]


@pytest.mark.slow
def test_ranks_that_wait_for_each_other_are_said_to(tmp_path: Path) -> None:
    job = run_job("all_wait_for_each_other", tmp_path)
    assert job.codes == [1, 1]
    hang = job.hangs[0]
    assert hang is not None
    assert hang.kind == "all wait"
    # It is in the step's data phase, the other one beyond it.
    assert 1 in hang.culprits


def status(rank: int, **values) -> Status:
    usual = Status(rank, "host", 10, 5, 7, 3, Phase.FORWARD_BACKWARD, 100.0, "then", True, True, "stack")
    return replace(usual, **values)


@pytest.mark.parametrize("seed", range(200))
def test_the_verdict_on_ranks_of_all_kinds(seed: int) -> None:
    """Whatever victims do and however many there are, the one that holds them up is named; nobody who works is."""
    draw = random.Random(seed)
    size = draw.randint(1, 12)
    before = [
        status(rank, phase=draw.choice([Phase.FORWARD_BACKWARD, Phase.OPTIMIZER, Phase.EVALUATION]))
        for rank in range(size)
    ]
    after = [replace(each, number=each.number + draw.randint(1, 4)) for each in before]
    culprit = draw.randrange(size)
    way = draw.choice(["silent", "still", "moves", "may take longer", "all wait", *(["left"] if size > 1 else [])])
    if way == "silent":
        after[culprit] = before[culprit]
    if way in ("still", "may take longer", "left"):
        after[culprit] = replace(
            after[culprit], waits=False, late=way != "may take longer", phase=Phase.DATA, left=way == "left"
        )
    if way == "moves":
        after[culprit] = replace(after[culprit], count=8, waits=False)
    hang = find_hang(before, after, 0)
    if way in ("silent", "still"):
        assert hang is not None
        assert (hang.kind, hang.culprits) == (way, (culprit,))
        assert Hang.from_json(hang.to_json()) == hang
    elif way in ("moves", "may take longer"):
        assert hang is None
    else:
        assert hang is not None
        assert hang.kind == "all wait"
        assert way == "all wait" or culprit not in hang.culprits


@pytest.mark.parametrize("seed", range(100))
def test_of_ranks_that_stand_in_some_line_the_one_whose_device_has_nothing_to_do_is_named(seed: int) -> None:
    """Others wait by their stacks or in a launch; the culprit's phase is no help."""
    draw = random.Random(seed)
    size = draw.randint(2, 12)
    culprit = draw.randrange(size)
    before = [status(rank, waits=draw.random() < 0.5, device_works=True) for rank in range(size)]
    before[culprit] = status(culprit, waits=False, phase=draw.choice(list(Phase)))
    after = [replace(each, number=each.number + 1) for each in before]
    hang = find_hang(before, after, 0)
    assert hang is not None
    assert (hang.kind, hang.culprits) == ("still", (culprit,))
    # Some of those that wait in a launch hold their interpreter.
    mute = [before[each.rank] if each.rank != culprit and draw.random() < 0.5 else each for each in after]
    hang = find_hang(before, mute, 0)
    assert hang is not None
    assert (hang.kind, hang.culprits) == ("still", (culprit,))
    # A device that never ends keeps its own host waiting as well: then they say which have got least far.
    after[culprit] = replace(after[culprit], device_works=True, iteration=2)
    hang = find_hang(before, after, 0)
    assert hang is not None
    assert (hang.kind, hang.culprits) == ("all wait", (culprit,))
    assert "100 s, while its device has work left" in hang.text
    # Work that may take longer is no hang.
    after[culprit] = replace(after[culprit], late=False)
    assert find_hang(before, after, 0) is None


def test_a_status_is_the_same_after_the_way_through_the_store() -> None:
    assert Status.from_json(status(3).to_json()) == status(3)


@pytest.mark.parametrize("phase", Phase)
def test_a_rank_that_stands_still_is_named_in_every_phase(phase: Phase) -> None:
    ranks = [status(0, phase=Phase.FORWARD_BACKWARD), status(1, phase=phase, waits=False)]
    hang = find_hang(ranks, [replace(each, number=each.number + 1) for each in ranks], 0)
    assert hang is not None
    assert (hang.culprits, hang.phase, hang.kind) == ((1,), phase, "still")


def test_the_first_step_and_checkpoints_may_take_long() -> None:
    heartbeat = Heartbeat()
    heartbeat.enter(Phase.FORWARD_BACKWARD, 1)
    assert heartbeat.beat.slow
    heartbeat.step_done()
    for phase in Phase:
        heartbeat.enter(phase, 2)
        assert heartbeat.beat.slow == (phase in (Phase.START, Phase.CHECKPOINT, Phase.PROFILE))
    assert heartbeat.beat.iteration == 2


def test_signs_of_life_cost_next_to_nothing() -> None:
    heartbeat = Heartbeat()
    started = time.process_time()
    for _ in range(10_000):
        heartbeat.enter(Phase.DATA)
    assert (time.process_time() - started) / 10_000 < 50e-6
