"""Checks that need all ranks at once: collectives, a shared file system, equal versions; and gathering the findings.

Each runs in its own process on every rank, with its own prefix in the store, so leftovers of an earlier check do no
harm. Must not know who started the ranks.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_fp8.doctor.finding import Finding, HostContext, Status
from megatron_fp8.doctor.host_checks import nearest_directory

MEETING_TIMEOUT = timedelta(seconds=90)
# A network file system may show another node's file with a delay.
SECONDS_TO_BE_SEEN = 30.0
_NUM_ELEMENTS = 1 << 20


def gloo(context: HostContext) -> Finding:
    """Whether the ranks connect and all-reduce over gloo, which every run uses for votes and objects."""
    import torch

    _meet("gloo", "gloo", context)
    return _summed("gloo", torch.device("cpu"))


def device_collectives(context: HostContext) -> Finding:
    """Whether the ranks' GPUs all-reduce over NCCL."""
    from megatron_fp8 import device

    here = device.prepare()
    if here.emulated:
        return Finding("nccl", Status.ABSENT, "no NVIDIA GPU: ranks communicate over gloo")
    _meet("nccl", here.collective_backend, context)
    return _summed("nccl", here.torch_device)


def _meet(name: str, backend: str, context: HostContext) -> None:
    """Initialize the process group of the check `name`."""
    import torch.distributed

    rank, size = context.rank, context.world_size
    meeting = torch.distributed.rendezvous(context.rendezvous, rank, size, timeout=MEETING_TIMEOUT)
    store = torch.distributed.PrefixStore(f"doctor/{name}", next(meeting)[0])
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=MEETING_TIMEOUT)


def _summed(name: str, torch_device: object) -> Finding:
    """An all-reduce of values that differ by rank and position, checked and timed."""
    import torch
    import torch.distributed

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    assert isinstance(torch_device, torch.device)
    places = torch.arange(_NUM_ELEMENTS, device=torch_device, dtype=torch.float32) % 97
    expected = places * size + size * (size - 1) / 2
    seconds = 0.0
    for _ in range(2):  # the first one also connects
        values = places + rank
        started = time.perf_counter()
        torch.distributed.all_reduce(values)
        wrong = int((values != expected).sum())
        seconds = time.perf_counter() - started
        if wrong:
            text = f"an all-reduce over {size} ranks gave {wrong} wrong values of {_NUM_ELEMENTS}"
            return Finding(name, Status.FAULT, text, "check links and GPUs: NCCL_DEBUG=INFO, nvidia-smi -q")
    text = f"all-reduce over {size} ranks, 4 MiB in {seconds * 1000:.1f} ms"
    return Finding(name, Status.OK, text)


def shared_files(context: HostContext) -> Finding:
    """Whether all ranks see a file that one rank writes and renames in the run root."""
    import torch.distributed

    if not torch.distributed.is_initialized():
        _meet("shared files", "gloo", context)
    size = context.world_size
    # Rank 0 names the probe.
    directory = nearest_directory(Path(context.run_root))
    probe = _gathered(f".doctor-{uuid.uuid4().hex}")[0]
    mine = directory / f"{probe}-{context.rank}"
    try:
        mine.with_suffix(".part").write_text(socket.gethostname(), encoding="utf-8")
        mine.with_suffix(".part").rename(mine)
        _gathered(None)
        unseen = _unseen([directory / f"{probe}-{rank}" for rank in range(size)])
        told = _gathered((socket.gethostname(), unseen))
    finally:
        mine.unlink(missing_ok=True)
    blind = [f"{host} (rank {rank}) does not see {ranks}" for rank, (host, ranks) in enumerate(told) if ranks]
    if blind:
        text = f"{directory} is not shared by all ranks: {'; '.join(blind[:4])}"
        advice = "put run.root, checkpoint.save and the data on a file system that all nodes mount at the same path"
        return Finding("shared files", Status.FAULT, text, advice)
    hosts = len({host for host, _ in told})
    text = f"{directory}: {size} ranks on {hosts} node{'s' if hosts > 1 else ''} see each other's files"
    return Finding("shared files", Status.OK, text)


def _unseen(paths: list[Path]) -> str:
    """The ranks whose file does not appear in time, as "rank 1, rank 3"."""
    deadline = time.monotonic() + SECONDS_TO_BE_SEEN
    missing = list(range(len(paths)))
    while missing and time.monotonic() < deadline:
        missing = [rank for rank in missing if not paths[rank].exists()]
        if missing:
            time.sleep(0.1)
    return ", ".join(f"rank {rank}" for rank in missing)


def same_versions(hosts: Sequence[str], by_rank: Sequence[Sequence[Finding]]) -> Finding:
    """Whether all ranks found the same versions."""
    told = [{name: text for one in findings for name, text in one.versions.items()} for findings in by_rank]
    first = told[0]
    differences = [
        f"{name} is {versions.get(name)} on {hosts[rank]} (rank {rank}) and {first.get(name)} on {hosts[0]} (rank 0)"
        for rank, versions in enumerate(told)
        for name in sorted({*versions, *first})
        if versions.get(name) != first.get(name)
    ]
    if differences:
        advice = "start every node from the same image, or install the same versions"
        return Finding("same versions", Status.FAULT, "; ".join(differences[:4]), advice)
    return Finding("same versions", Status.OK, f"{len(first)} versions, the same on {len(told)} ranks")


def gather(context: HostContext) -> list[tuple[str, list[dict[str, Any]]]]:
    """By rank: its host name and its findings, as plain data."""
    _meet("gather", "gloo", context)
    return _gathered((socket.gethostname(), [finding.as_json() for finding in context.findings]))


def _gathered(value: object) -> list[Any]:
    import torch.distributed

    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
