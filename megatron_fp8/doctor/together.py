"""Owns the checks that need all ranks at once: collectives, one file system, the same versions; and their gathering.

Every rank carries out all of them in the order of `CHECKS`; the first makes the process group. Must not know who
started the ranks.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from datetime import timedelta
from pathlib import Path

from megatron_fp8.doctor.finding import Finding, Status, Surroundings
from megatron_fp8.doctor.machine import nearest_directory

MEETING_TIMEOUT = timedelta(seconds=90)
# A network file system may show another machine's file some time after it was made.
SECONDS_TO_BE_SEEN = 30.0
_NUM_ELEMENTS = 1 << 20


def gloo(surroundings: Surroundings) -> Finding:
    """Whether the ranks meet, and sum over gloo, which carries the votes and objects of every run."""
    import torch
    import torch.distributed

    rank, size = surroundings.rank, surroundings.world_size
    torch.distributed.init_process_group(
        "gloo", init_method=surroundings.rendezvous, rank=rank, world_size=size, timeout=MEETING_TIMEOUT
    )
    return _summed("gloo", torch.device("cpu"), None)


def device_collectives(surroundings: Surroundings) -> Finding:  # noqa: ARG001 - every check is called alike
    """Whether the ranks' GPUs sum over NCCL."""
    from megatron_fp8 import device

    here = device.prepare()
    import torch.distributed

    if here.emulated:
        return Finding("nccl", Status.ABSENT, "no NVIDIA GPU: ranks exchange over gloo")
    group = torch.distributed.new_group(backend=here.collective_backend, timeout=MEETING_TIMEOUT)
    return _summed(here.collective_backend, here.torch_device, group)


def _summed(name: str, torch_device: object, group: object) -> Finding:
    """A sum over all ranks of numbers that tell ranks and places apart, checked and timed."""
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
        torch.distributed.all_reduce(values, group=group)
        wrong = int((values != expected).sum())
        seconds = time.perf_counter() - started
        if wrong:
            text = f"an all-reduce over {size} ranks gave {wrong} wrong numbers of {_NUM_ELEMENTS}"
            return Finding(name, Status.FAULT, text, "look for a broken link or GPU: NCCL_DEBUG=INFO, nvidia-smi -q")
    text = f"all-reduce over {size} ranks, 4 MiB in {seconds * 1000:.1f} ms"
    return Finding(name, Status.OK, text)


def shared_files(surroundings: Surroundings) -> Finding:
    """Whether what one rank writes and renames at the run root is there for all."""
    size = surroundings.world_size
    # Rank 0 names the probe; the directory is the nearest one that every rank has.
    directory = nearest_directory(Path(surroundings.run_root))
    probe = _gathered(f".doctor-{uuid.uuid4().hex}")[0]
    mine = directory / f"{probe}-{surroundings.rank}"
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
        text = f"{directory} is not the same directory for all ranks: {'; '.join(blind[:4])}"
        advice = "put run.root, checkpoint.save and the data on a file system that all machines mount at the same path"
        return Finding("shared files", Status.FAULT, text, advice)
    hosts = len({host for host, _ in told})
    text = f"{directory}: {size} ranks on {hosts} machine{'s' if hosts > 1 else ''} see each other's files"
    return Finding("shared files", Status.OK, text)


def _unseen(paths: list[Path]) -> str:
    """The ranks whose file does not appear, as "rank 1, rank 3"; waits for those that come late."""
    deadline = time.monotonic() + SECONDS_TO_BE_SEEN
    missing = list(range(len(paths)))
    while missing and time.monotonic() < deadline:
        missing = [rank for rank in missing if not paths[rank].exists()]
        if missing:
            time.sleep(0.1)
    return ", ".join(f"rank {rank}" for rank in missing)


def same_versions(surroundings: Surroundings) -> Finding:
    """Whether all ranks run the same versions."""
    mine = {name: text for finding in surroundings.findings for name, text in finding.versions.items()}
    told = _gathered((socket.gethostname(), mine))
    host, first = told[0]
    differences = [
        f"{name} is {versions.get(name)} on {other} (rank {rank}) and {first.get(name)} on {host} (rank 0)"
        for rank, (other, versions) in enumerate(told)
        for name in sorted({*versions, *first})
        if versions.get(name) != first.get(name)
    ]
    if differences:
        advice = "start every machine from the same image, or install the same versions"
        return Finding("same versions", Status.FAULT, "; ".join(differences[:4]), advice)
    return Finding("same versions", Status.OK, f"{len(first)} versions are the same on {len(told)} ranks")


def gather(surroundings: Surroundings) -> list[list[dict]]:
    """What every rank found, by rank, as plain data."""
    return _gathered(json.loads(json.dumps([finding.as_json() for finding in surroundings.findings])))


def _gathered(value: object) -> list:
    import torch.distributed

    values: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
