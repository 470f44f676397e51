"""Owns the directory of sample indices: built once, whole or absent, never stale, shared by runs and ranks.

Megatron Core names its index files by prefix and settings alone, takes any file of that name for a whole one
and lets every job write into the same directory. Token files replaced under the same name, an interrupted
build, or two jobs that start together then give wrong samples or a crash. So here each build has a directory
of its own: its name depends on the token files' sizes and times too, it is built under a temporary name and
renamed when it is whole. Must not know what is inside.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed

from megatron_fp8.config.problem import BadInputError
from megatron_fp8.data.token_file import bin_path, idx_path

Result = TypeVar("Result")


class IndexCacheError(BadInputError):
    """The directory of sample indices cannot be used; the text names it and what to do."""


@dataclass(frozen=True)
class Plan:
    """Rank 0's decision: where to build or load. `directory` equals `final` when the indices are there."""

    directory: Path
    final: Path

    @property
    def is_ready(self) -> bool:
        """Whether the indices only have to be loaded."""
        return self.directory == self.final


def cache_key(prefixes: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Name of a build: a hash of everything its indices depend on. `settings` must be JSON."""
    files = {
        str(path): [path.stat().st_size, path.stat().st_mtime_ns]
        for prefix in prefixes
        for path in (idx_path(prefix), bin_path(prefix))
    }
    description = json.dumps({"files": files, "settings": settings}, sort_keys=True)
    return hashlib.sha256(description.encode()).hexdigest()[:16]


def build_cached(root: Path, key: Callable[[], str], build: Callable[[Path], Result]) -> Result:
    """`build(directory)` with a directory that holds this key's indices, or will after it.

    With torch.distributed initialised every rank must call this: rank 0 alone calls `key`, decides and
    publishes; `build` runs on all of them and has rank 0 write before the others read. Raises IndexCacheError
    when `root` cannot be written or another node does not see what rank 0 built.
    """
    plan = _agree(root, key)
    if not plan.is_ready:
        result = _build_and_publish(plan, build)
    elif plan.final.is_dir():
        result = build(plan.final)
    else:
        raise IndexCacheError(_not_visible(plan.final))
    return result


def _build_and_publish(plan: Plan, build: Callable[[Path], Result]) -> Result:
    try:
        result = build(plan.directory)
    except BaseException as error:
        if _rank() == 0:
            shutil.rmtree(plan.directory, ignore_errors=True)
        elif isinstance(error, FileNotFoundError) and not plan.directory.is_dir():
            raise IndexCacheError(_not_visible(plan.directory)) from error
        raise
    # Every rank has its files open now; an open file survives the renaming of its directory.
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    if _rank() == 0:
        _publish(plan)
    return result


def _publish(plan: Plan) -> None:
    """Give the whole directory its name; where another job was faster its equal directory stays."""
    try:
        plan.directory.rename(plan.final)
    except OSError:
        if not plan.final.is_dir():
            raise
        shutil.rmtree(plan.directory, ignore_errors=True)


def _agree(root: Path, key: Callable[[], str]) -> Plan:
    """Rank 0's plan on every rank."""
    decision: list[Any] = [None]
    if _rank() == 0:
        name = key()
        try:
            decision = [_plan(root, name)]
        except OSError as error:
            # Sent, not raised at once: the others would wait for a rank that is gone.
            decision = [
                f"sample indices cannot be kept in {root}: {error}. Set data.data_cache_path to a directory "
                f"that can be written"
            ]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(decision, src=0)
    if isinstance(decision[0], str):
        raise IndexCacheError(decision[0])
    plan: Plan = decision[0]
    return plan


def _plan(root: Path, key: str) -> Plan:
    final = root / key
    if final.is_dir():
        return Plan(final, final)
    directory = root / f".{key}.incomplete-{socket.gethostname()}-{os.getpid()}-{time.time_ns()}"
    directory.mkdir(parents=True)
    return Plan(directory, final)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _not_visible(directory: Path) -> str:
    return (
        f"rank {_rank()} on {socket.gethostname()} does not see {directory}, which rank 0 made. Set "
        f"data.data_cache_path to a directory on a disk that all nodes share"
    )
