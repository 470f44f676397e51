"""Several machines on one: each a set of Linux namespaces with its own network, host name and process ids.

The nodes hang on a bridge that lies in a namespace too, so no address and no port of this machine is taken. Nothing
has to be taken down: a namespace goes with its last process, and the first one of each node, which ends all the others
of the node with it, ends when the pipe from the test closes.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.77.0"
# A user namespace of our own, in which one may make the others without being root.
UNSHARE_HUB = ("unshare", "--user", "--map-root-user", "--net")
UNSHARE_NODE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# Says that all is made, and stays until its standard input is closed.
STAY = "echo made && exec cat"


class NamespaceError(Exception):
    """This machine does not let us make namespaces."""


@dataclass(frozen=True)
class Node:
    """A machine of the network. `pid`: its first process, as this machine counts; `port`: its plug in the bridge."""

    name: str
    address: str
    pid: int
    port: str
    hub_pid: int

    def command(self, command: Sequence[str | Path], cwd: Path) -> list[str]:
        """`command` as a command line that runs it on this node, in `cwd`."""
        enter = [*_enter(self.pid), "--uts", "--mount", "--pid"]
        return [*enter, "env", "-C", str(cwd), *(str(part) for part in command)]

    def cut_off(self) -> None:
        """From now on no packet reaches the node or leaves it, and nobody is told: a switch that fails."""
        _run([*_enter(self.hub_pid), "ip", "link", "set", self.port, "nomaster"])

    def reconnect(self) -> None:
        """The opposite of `cut_off`."""
        _run([*_enter(self.hub_pid), "ip", "link", "set", self.port, "master", "hub"])


def hosts_file(num_nodes: int) -> str:
    """An `/etc/hosts` by which every node finds every other and itself."""
    lines = [f"{address_of(number)} node{number}" for number in range(1, num_nodes + 1)]
    return "\n".join(["127.0.0.1 localhost", *lines, ""])


def address_of(number: int) -> str:
    """The address of the node of this number, from 1 on."""
    return f"{NETWORK}.{number}"


@contextmanager
def network(hosts: Sequence[str]) -> Iterator[list[Node]]:
    """Nodes `node1`, `node2`, ...; `hosts`: what the `/etc/hosts` of each says. Raises NamespaceError."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hub = stack.enter_context(_staying([*UNSHARE_HUB, "sh", "-c", f"ip link add hub type bridge && {STAY}"]))
        _run([*_enter(hub), "ip", "link", "set", "hub", "up"])
        nodes = []
        for number, text in enumerate(hosts, 1):
            name, port = f"node{number}", f"port{number}"
            file = directory / name
            file.write_text(text, encoding="utf-8")
            script = f"hostname {name} && mount --bind {file} /etc/hosts && ip link set lo up && {STAY}"
            unshare = [*_enter(hub), "--preserve-credentials", *UNSHARE_NODE, "sh", "-c", script]
            pid = _child(stack.enter_context(_staying(unshare)))
            _run([*_enter(hub), "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid)])
            _run([*_enter(hub), "ip", "link", "set", port, "master", "hub", "up"])
            _run([*_enter(pid), "ip", "address", "add", f"{address_of(number)}/24", "dev", "eth0"])
            _run([*_enter(pid), "ip", "link", "set", "eth0", "up"])
            nodes.append(Node(name, address_of(number), pid, port, hub))
        yield nodes


def _enter(pid: int) -> list[str]:
    """The beginning of a command line that runs in the network of that process."""
    return ["nsenter", "--target", str(pid), "--user", "--net"]


@contextmanager
def _staying(command: Sequence[str]) -> Iterator[int]:
    """A process that has said that all is made, by its number; it ends with the context, or with this process."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if process.stdout.readline() != "made\n":
                raise NamespaceError(f"{' '.join(command)}: {process.stderr.read().strip()}")
            yield process.pid
        finally:
            process.kill()


def _child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return int(child)


def _run(command: Sequence[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise NamespaceError(f"{' '.join(command)}: {ended.stderr.strip()}")
