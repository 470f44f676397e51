"""Starts the process group: reads this rank's place from torchrun's environment, and connects the ranks.

torchrun keeps one store over all its restarts, and torch writes the same keys in each. A rank that reads early would
get what a rank of the previous launch wrote (gloo's addresses, NCCL's id, a verdict of the watchdog), and wait for a
process that is gone. Restart counts do not tell launches apart: each node keeps its own. So each rank asks rank 0 under
a fresh UUID, and rank 0 replies with a name it drew for this launch, which prefixes all its keys.
"""

import os
import socket
import time
import uuid
from datetime import timedelta

import psutil
import torch
import torch.distributed
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import DistStoreError
from torch.distributed.rendezvous import rendezvous

from megatron_fp8.config.environment import foreign_tasks
from megatron_fp8.errors import BadInputError

_POLL_SECONDS = 0.02
_MAX_NAMED = 16


class ConnectError(RuntimeError):
    """The ranks did not find or could not reach each other."""


def world_size() -> int:
    """Number of ranks according to the launcher; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def global_rank() -> int:
    """This process's rank according to the launcher; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def init_process_group(backend: str, timeout_minutes: float) -> None:
    """Connect the ranks; `timeout_minutes` bounds this call and every collective.

    Without a launcher this process is a job of one rank and needs neither an address nor a port. Raises BadInputError
    when several tasks of a launcher other than torchrun would each become such a job.
    """
    timeout = timedelta(minutes=timeout_minutes)
    if "RANK" in os.environ:
        _connect(backend, timeout)
        return
    tasks = foreign_tasks(os.environ)
    if tasks is not None:
        raise BadInputError(tasks.text)
    store = HashStore()
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def store_of_this_launch(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """A view of `store` whose keys only this launch uses. Every rank calls this; rank 0 waits for all others.

    Raises ConnectError after `timeout`, on rank 0 with the ranks that are missing.
    """
    name = _answer_all(store, world_size, timeout) if rank == 0 else _ask_rank_0(store, rank, timeout)
    own = PrefixStore(f"start {name}", store)
    own.set_timeout(timeout)
    return own


def _ask_rank_0(store: Store, rank: int, timeout: timedelta) -> str:
    question = uuid.uuid4().hex
    store.set_timeout(timeout)
    store.set(f"question of rank {rank}", question)
    try:
        name = store.get(f"answer to {question}").decode()
    except DistStoreError as error:
        raise ConnectError(f"rank 0 did not connect within {timeout.total_seconds():g} s: {error}") from error
    store.set(f"{name}: rank {rank} has connected", "")
    return name


def _answer_all(store: Store, world_size: int, timeout: timedelta) -> str:
    name = uuid.uuid4().hex
    ends = time.monotonic() + timeout.total_seconds()
    answered: dict[int, bytes] = {}
    missing = list(range(1, world_size))
    while missing:
        for rank in missing:
            key = f"question of rank {rank}"
            question = store.get(key) if store.check([key]) else None
            # It may be left over from an earlier launch, where nobody waits for the answer any more.
            if question is not None and question != answered.get(rank):
                store.set(f"answer to {question.decode()}", name)
                answered[rank] = question
        missing = [rank for rank in missing if not store.check([f"{name}: rank {rank} has connected"])]
        if missing and time.monotonic() > ends:
            shown = ", ".join(map(str, missing[:_MAX_NAMED])) + (" and more" if len(missing) > _MAX_NAMED else "")
            raise ConnectError(f"{len(missing)} of {world_size} ranks did not connect within {timeout}: {shown}")
        if missing:
            time.sleep(_POLL_SECONDS)
    return name


def _connect(backend: str, timeout: timedelta) -> None:
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    store = store_of_this_launch(store, rank, size, timeout)
    try:
        torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        if "connectFullMesh" not in str(error):
            raise
        raise ConnectError(_unreachable(str(error))) from None


def _unreachable(error: str) -> str:
    """The message for a failed connection: gloo may listen on an address that other nodes cannot reach."""
    name = socket.gethostname()
    interfaces = ", ".join(f"{interface} {address}" for interface, address in _interfaces().items())
    given = os.environ.get("GLOO_SOCKET_IFNAME")
    listens = f"GLOO_SOCKET_IFNAME={given}" if given else f"{_address_of(name)}, the address of its host name"
    return (
        f"rank {global_rank()} on {name} cannot connect to the other ranks: {error}\n"
        "    why: another rank has failed (see its own error), or gloo listens on an address that other nodes cannot\n"
        f"         reach: on {name} that is {listens}\n"
        "    use: GLOO_SOCKET_IFNAME=NAME on every node, naming an interface in the network that all nodes share;\n"
        f"         {name} has {interfaces}"
    )


def _address_of(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return "127.0.0.1 (its host name does not resolve)"


def _interfaces() -> dict[str, str]:
    """IPv4 address by interface of this node."""
    addresses = {
        interface: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for interface, entries in psutil.net_if_addrs().items()
    }
    return {interface: found[0] for interface, found in addresses.items() if found}
