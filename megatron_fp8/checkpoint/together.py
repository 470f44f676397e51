"""Owns what the ranks of a job do together with files: one acts and all learn how it went, or each takes a share."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.checkpoint.manifest import CheckpointError, damage
from megatron_fp8.checkpoint.start import start_from
from megatron_fp8.config.length import samples_needed
from megatron_fp8.config.schema import Config
from megatron_fp8.config.start import Start
from megatron_fp8.errors import BadInputError

_T = TypeVar("_T")


def on_rank_0(action: Callable[[], Any], device: torch.device) -> None:
    """Do something on rank 0; every rank waits for it, and raises CheckpointError when it failed there."""
    error: Exception | None = None
    if torch.distributed.get_rank() == 0:
        try:
            action()
        except (CheckpointError, OSError) as caught:
            error = caught
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
    torch.distributed.broadcast(failed, src=0)
    if error is not None:
        raise CheckpointError(str(error)) from error
    if failed.item():
        raise CheckpointError("rank 0 could not do its part of the checkpoint; its own error says why")


def from_rank_0(value: _T) -> _T:
    """Rank 0's `value` on every rank. Collective."""
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def after_all(action: Callable[[], None]) -> None:
    """Do something once every rank has come here: rank 0 holds what all of them read. Collective."""
    torch.distributed.barrier()
    action()


@contextmanager
def all_or_none(device: torch.device) -> Iterator[None]:
    """Each rank does what is inside, nothing collective; all raise CheckpointError with the reasons where one does."""
    error: Exception | None = None
    try:
        yield
    except (CheckpointError, OSError) as caught:
        error = caught
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(failed)
    if not failed.item():
        return
    reasons: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reasons, None if error is None else str(error))
    found = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None)
    raise CheckpointError(found) from error


def on_no_rank(names: Sequence[str], mine: Collection[str], device: torch.device) -> list[str]:
    """Those of `names`, the same on every rank, that are in no rank's `mine`. Collective."""
    taken = torch.tensor([name in mine for name in names], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(taken, torch.distributed.ReduceOp.MAX)
    return [name for name, is_taken in zip(names, taken.tolist(), strict=True) if not is_taken]


def whole_start(start: Start, config: Config) -> tuple[Start, list[str]]:
    """`start` with a checkpoint whose every byte is as written, and what a person should know. Collective.

    An older checkpoint takes the place of a damaged one where the start allows it. Raises BadInputError otherwise, and
    where the length of the run, which was derived for the damaged one, would be another.
    """
    notes: list[str] = []
    while start.checkpoint is not None:
        problems = damage_by_all_ranks(start.checkpoint)
        if not problems:
            break
        found = f"the checkpoint is damaged: {'; '.join(problems)}"
        directory = CheckpointDirectory(start.checkpoint.parent)
        iteration = directory.iteration(start.checkpoint)
        older = _older_on_rank_0(directory, iteration) if iteration is not None else None
        if not start.may_fall_back:
            use = f"checkpoint.ckpt_step={older}, or --resume=auto" if older is not None else "another checkpoint"
            raise BadInputError(f"{found}\n    use: {use}")
        if older is None:
            raise BadInputError(f"{found}\n    no older checkpoint in {directory.root} is whole")
        notes.append(f"{found}; taking iteration {older} instead")
        chosen = start_from(start, directory.path(older))
        if _length_by_samples(config, chosen) != _length_by_samples(config, start):
            use = f"--resume with checkpoint.ckpt_step={older}"
            raise BadInputError(f"{found}\n    steps had another size before iteration {iteration}\n    use: {use}")
        start = chosen
    return start, notes


def _older_on_rank_0(directory: CheckpointDirectory, iteration: int) -> int | None:
    is_first = torch.distributed.get_rank() == 0
    return from_rank_0(directory.newest_whole(before=iteration, contents=False) if is_first else None)


def _length_by_samples(config: Config, start: Start) -> int | None:
    """The samples of the whole run, where these and not the steps say how long it is."""
    training = config.training
    if training.train_samples is None and training.train_epochs is None:
        return None
    return samples_needed(training, start.position) - start.position.skipped_samples


def damage_by_all_ranks(checkpoint: Path) -> list[str]:
    """What is wrong with a checkpoint's files, each read by one rank; the same on every rank. Collective."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found: list[list[str]] = [[] for _ in range(world_size)]
    torch.distributed.all_gather_object(found, list(damage(checkpoint, share=(rank, world_size))))
    return sorted({problem for problems in found for problem in problems})
