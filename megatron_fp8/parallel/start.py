"""Owns the start of the process group: who this rank is, and how ranks find each other.

Reads what `torchrun` puts into the environment. Must not know models or formats.
"""

import os
import socket
from datetime import timedelta

import psutil
import torch
import torch.distributed

from megatron_fp8.config.launcher import foreign_tasks
from megatron_fp8.errors import BadInputError
from megatron_fp8.parallel.rendezvous import ConnectError, store_of_this_start


def world_size() -> int:
    """Ranks of the job as the launcher says, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def global_rank() -> int:
    """This process's rank as the launcher says, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def init_process_group(backend: str, timeout_minutes: float) -> None:
    """Connect the ranks; `timeout_minutes` bounds the start and every collective.

    Without a launcher the process is a world of one and needs neither address nor port. Raises BadInputError where
    several tasks of a launcher that is not torchrun would each be such a world.
    """
    timeout = timedelta(minutes=timeout_minutes)
    if "RANK" in os.environ:
        _connect(backend, timeout)
        return
    tasks = foreign_tasks(os.environ)
    if tasks is not None:
        raise BadInputError(tasks.text)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def _connect(backend: str, timeout: timedelta) -> None:
    store, rank, size = next(torch.distributed.rendezvous("env://", timeout=timeout))
    store = store_of_this_start(store, rank, size, timeout)
    try:
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        raise ConnectError(_how_gloo_connects(str(error))) from None


def _how_gloo_connects(error: str) -> str:
    """What a person needs to know where gloo took an address by which other machines cannot reach this one."""
    name = socket.gethostname()
    interfaces = ", ".join(f"{interface} {address}" for interface, address in _interfaces().items())
    given = os.environ.get("GLOO_SOCKET_IFNAME")
    listens = f"GLOO_SOCKET_IFNAME={given}" if given else f"{_address_of(name)}, which its name stands for"
    return (
        f"rank {global_rank()} on {name} cannot connect to the other ranks: {error}\n"
        "    why: another rank has ended, which says why itself; or gloo listens where other machines cannot reach\n"
        f"         it: on {name} that is {listens}\n"
        "    use: GLOO_SOCKET_IFNAME=NAME on every node, an interface in the network that all nodes share;\n"
        f"         {name} has {interfaces}"
    )


def _address_of(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return "127.0.0.1, since it knows no address"


def _interfaces() -> dict[str, str]:
    """The IPv4 address of each interface of this machine that has one."""
    addresses = {
        interface: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for interface, entries in psutil.net_if_addrs().items()
    }
    return {interface: found[0] for interface, found in addresses.items() if found}
