"""A check's finding, its context, and the environment of its process. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Status(str, Enum):
    """What a check found."""

    OK = "ok"
    ABSENT = "not here"
    """Not available and not needed; the text says why."""
    FAULT = "FAULT"
    """Training here would fail or give wrong results; `advice` says what to do."""


@dataclass(frozen=True)
class Finding:
    """What one check found on one rank. `versions`: by name, for the version matrix."""

    check: str
    status: Status
    text: str
    advice: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain data, which `from_json` reads."""
        return {**asdict(self), "status": self.status.value}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Finding:
        """The finding that `as_json` wrote."""
        return Finding(**{**data, "status": Status(data["status"])})


@dataclass(frozen=True)
class HostContext:
    """What a check is given. `rendezvous`: torch's init method. `min_gpus`: fewer are a fault.

    `findings`: of this rank, before the ranks connect.
    """

    run_root: str = "runs"
    min_gpus: int = 0
    rank: int = 0
    world_size: int = 1
    rendezvous: str = "env://"
    findings: tuple[Finding, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain data, which `from_json` reads."""
        return {**asdict(self), "findings": [finding.as_json() for finding in self.findings]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> HostContext:
        """The context that `as_json` wrote."""
        return HostContext(**{**data, "findings": tuple(Finding.from_json(item) for item in data["findings"])})


def launched() -> tuple[int, int] | None:
    """(rank, number of ranks) that torchrun gave this process; None without it.

    RANK alone says nothing: Kubernetes' operators number pods by it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def child_environment(local_rank: int | None = None, num_ranks: int = 1) -> dict[str, str]:
    """This process's environment; with `local_rank`, that of a rank of a single-node job."""
    if local_rank is None:
        return dict(os.environ)
    rank = {"RANK": str(local_rank), "LOCAL_RANK": str(local_rank)}
    return {**os.environ, **rank, "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
