"""File operations of all ranks: one rank acts and all learn the outcome, or each takes a share."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.checkpoint.manifest import CheckpointError, find_corruption
from megatron_fp8.checkpoint.resume import start_from
from megatron_fp8.config.run_start import Start, samples_needed
from megatron_fp8.config.schema import Config
from megatron_fp8.errors import BadInputError
from megatron_fp8.parallel.object_collectives import all_gather, broadcast


def on_rank_0(action: Callable[[], Any]) -> None:
    """Run `action` on rank 0 while the others wait; all raise CheckpointError if it fails."""
    error: Exception | None = None
    if torch.distributed.get_rank() == 0:
        try:
            action()
        except (CheckpointError, OSError) as caught:
            error = caught
    reason = broadcast(None if error is None else str(error))
    if reason is not None:
        raise CheckpointError(reason) from error


@contextmanager
def all_or_none() -> Iterator[None]:
    """All ranks raise CheckpointError with the reasons if any rank fails inside, where nothing is collective."""
    error: Exception | None = None
    try:
        yield
    except (CheckpointError, OSError) as caught:
        error = caught
    reasons = all_gather(None if error is None else str(error))
    failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None]
    if failed:
        raise CheckpointError("; ".join(failed)) from error


def unclaimed(names: Sequence[str], mine: Collection[str], device: torch.device) -> list[str]:
    """Those of `names`, which are the same on every rank, that are in no rank's `mine`. Collective."""
    taken = torch.tensor([name in mine for name in names], dtype=torch.int32, device=device)
    torch.distributed.all_reduce(taken, torch.distributed.ReduceOp.MAX)
    return [name for name, is_taken in zip(names, taken.tolist(), strict=True) if not is_taken]


def verified_start(start: Start, config: Config) -> tuple[Start, list[str]]:
    """`start` after verifying every byte of its checkpoint, and notes for the user. Collective.

    An older checkpoint replaces a corrupt one if the start allows it. Otherwise raises BadInputError; so it does if the
    length of the run, which was derived for the corrupt one, would change.
    """
    notes: list[str] = []
    while start.checkpoint is not None:
        problems = find_corruption_collective(start.checkpoint)
        if not problems:
            break
        found = f"the checkpoint is corrupt: {'; '.join(problems)}"
        directory = CheckpointDirectory(start.checkpoint.parent)
        iteration = directory.iteration(start.checkpoint)
        older = None
        if iteration is not None:
            is_first = torch.distributed.get_rank() == 0
            older = broadcast(directory.newest_intact(before=iteration, contents=False) if is_first else None)
        if not start.may_fall_back:
            use = f"checkpoint.ckpt_step={older}, or --resume=auto" if older is not None else "another checkpoint"
            raise BadInputError(f"{found}\n    use: {use}")
        if older is None:
            raise BadInputError(f"{found}\n    no older checkpoint in {directory.root} is intact")
        notes.append(f"{found}; using iteration {older} instead")
        chosen = start_from(start, directory.path(older))
        if _length_by_samples(config, chosen) != _length_by_samples(config, start):
            use = f"--resume with checkpoint.ckpt_step={older}"
            raise BadInputError(f"{found}\n    the batch size changed before iteration {iteration}\n    use: {use}")
        start = chosen
    return start, notes


def _length_by_samples(config: Config, start: Start) -> int | None:
    """Samples of the whole run, if its length is given in samples or epochs; else None."""
    training = config.training
    if training.train_samples is None and training.train_epochs is None:
        return None
    return samples_needed(training, start.position) - start.position.skipped_samples


def find_corruption_collective(checkpoint: Path) -> list[str]:
    """One message per missing or corrupt file, of which each rank reads a share; the same on every rank. Collective."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = all_gather(list(find_corruption(checkpoint, share=(rank, world_size))))
    return sorted({problem for problems in found for problem in problems})
