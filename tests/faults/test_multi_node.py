"""One run over several machines: network namespaces with addresses of their own, one torchrun in each."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import TRAIN_ITERS, Tiny
from tests.e2e.launch import PRETRAIN, Ended, clean_environment, run
from tests.e2e.test_resume import events
from tests.faults.elastic_runs import assert_same_end, last_iteration
from tests.faults.namespaces import NamespaceError, Node, hosts_file, network

PORT = 29500
# Between two processes that have 4 others beside them on two cores.
MOST_SECONDS = 400


@pytest.fixture(scope="module")
def namespaces() -> None:
    """Nothing; skips where this machine allows no namespaces."""
    try:
        with network([hosts_file(1)]):
            pass
    except (NamespaceError, OSError) as error:
        pytest.skip(f"no network namespaces: {error}")


class Launched:
    """torchrun on one node; its output is in a file, where it can be looked at meanwhile."""

    def __init__(self, node: Node, command: Sequence[str | Path], directory: Path, environment: dict[str, str]) -> None:
        self.node = node
        self.output = directory / f"{node.name}.txt"
        with self.output.open("w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                node.command(command, directory),
                env=clean_environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8")

    def wait(self, seconds: float = MOST_SECONDS) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.node.name} has not ended after {seconds} s\n{self.text()}") from None

    def wait_for_ranks(self, seconds: float = MOST_SECONDS) -> None:
        """Until the launcher has no rank any more."""
        ends = time.monotonic() + seconds
        while any(map(_is_rank, self._processes())):
            assert time.monotonic() < ends, f"{self.node.name} has ranks after {seconds} s\n{self.text()}"
            time.sleep(0.05)

    def kill(self) -> None:
        """The launcher and all that it started."""
        for process in self._processes():
            process.kill()
        self.process.wait()

    def _processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def _is_rank(process: psutil.Process) -> bool:
    try:
        # A launcher that waits for something else does not take notice of its ranks' end.
        if process.status() == psutil.STATUS_ZOMBIE or process.name() == "nsenter":
            return False
        return "torch.distributed.run" not in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def launch(
    nodes: Sequence[Node], directory: Path, *arguments: str, per_node: int, endpoint: str = f"node1:{PORT}", **more: str
) -> list[Launched]:
    """The README's line of several nodes, on each of them."""
    meeting = ["--rdzv-id", "tiny", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    ranks = ["--nnodes", str(len(nodes)), "--nproc-per-node", str(per_node), "--monitor-interval", "0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *ranks, *meeting, PRETRAIN, "tiny.yaml", *arguments]
    return [Launched(node, command, directory, more) for node in nodes]


def on_one_machine(directory: Path, num_ranks: int, *arguments: str) -> Ended:
    """The same ranks under one torchrun, undisturbed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [*launcher, PRETRAIN, "tiny.yaml", "run.name=straight", *arguments]
    return run(command, directory, timeout_seconds=MOST_SECONDS)


def wait_until(condition: Callable[[], bool], launched: Sequence[Launched]) -> None:
    """Look again and again; nobody may end meanwhile."""
    ends = time.monotonic() + MOST_SECONDS
    while not condition():
        everything = "\n".join(one.text() for one in launched)
        assert all(one.process.poll() is None for one in launched), everything
        assert time.monotonic() < ends, everything
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(("num_nodes", "per_node"), [(2, 2), (4, 1)])
def test_nodes_train_as_one_machine_does(tiny: Tiny, tmp_path: Path, num_nodes: int, per_node: int) -> None:
    """Tensor-parallel ranks inside a node or across two, data-parallel ones across nodes: bit for bit the same."""
    tiny.write_config(tmp_path, tp=2)
    straight = on_one_machine(tmp_path, 4)
    assert straight.code == 0, straight.output
    with network([hosts_file(num_nodes)] * num_nodes) as nodes:
        launched = launch(nodes, tmp_path, per_node=per_node)
        assert [one.wait() for one in launched] == [0] * num_nodes, "\n".join(one.text() for one in launched)
    # One rank of all writes.
    assert [f"iteration {TRAIN_ITERS}/" in one.text() for one in launched].count(True) == 1
    assert_same_end(tmp_path / "runs" / "tiny", tmp_path / "runs" / "straight")


HANG = (
    r"hang detected: rank 1 does not report[\s\S]*rank 1 \(node2, process \d+\): iteration \d+, phase",
    r"the store that the ranks report through has not answered for \d+ s[\s\S]*Seen by rank 1 "
    r"\(node2, process \d+\): iter",
)
LOST = tuple(
    rf"rank {rank} on node{rank + 1}, iteration \d+, phase [\w-]+: another rank does not answer, after [\d.]+ s: "
    r"[\s\S]*parallel\.distributed_timeout_minutes=1\b"
    for rank in range(2)
)


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("hang_timeout_minutes", "says"), [(0.5, HANG), (0, LOST)], ids=["watchdog", "timeout"])
def test_a_node_cut_off_in_mid_step_ends_the_job_and_a_restart_goes_on(
    tiny: Tiny, tmp_path: Path, hang_timeout_minutes: float, says: Sequence[str]
) -> None:
    """Packets vanish, so no side is told. Both end with a message in time; then the same line goes on, bit for bit."""
    tiny.write_config(tmp_path, tp=2)
    command = (
        "--resume=auto",
        "training.train_iters=60",
        "training.eval_interval=0",
        "checkpoint.save_interval=10",
        "parallel.distributed_timeout_minutes=1",
        f"faults.hang_timeout_minutes={hang_timeout_minutes}",
        "faults.hang_timeout_slow_minutes=1",
    )
    straight = on_one_machine(tmp_path, 2, *command)
    assert straight.code == 0, straight.output
    directory = tmp_path / "runs" / "tiny"
    with network([hosts_file(2)] * 2) as nodes:
        launched = launch(nodes, tmp_path, *command, per_node=1)
        wait_until(lambda: last_iteration(directory) >= 12, launched)
        nodes[1].cut_off()
        cut_off_at = time.monotonic()
        assert launched[0].wait() == 1, launched[0].text()
        launched[1].wait_for_ranks()
        seconds = time.monotonic() - cut_off_at
        # The timeout, ten seconds for who may know the cause, and what a busy machine adds.
        assert seconds < 60 + 10 + 60, "\n".join(one.text() for one in launched)
        for one, pattern in zip(launched, says, strict=True):
            assert re.search(pattern, one.text()), one.text()
        # torchrun itself waits there for the store until TCP gives up: a scheduler would kill it.
        launched[1].kill()
        assert last_iteration(directory) < 60
        nodes[1].reconnect()
        again = launch(nodes, tmp_path, *command, per_node=1)
        assert [one.wait() for one in again] == [0, 0], "\n".join(one.text() for one in again)
    (resumed,) = events(directory, "resume")
    assert resumed["iteration"] >= 10
    assert_same_end(directory, tmp_path / "runs" / "straight")
