"""Chooses what a run starts from: initial weights, its own latest checkpoint, or another run's.

Nothing is changed here, and only sizes are compared; all ranks verify the contents later. A job locks the run's
directory, or the other run's checkpoint, before it chooses; `--check` locks nothing. A path without a checkpoint is an
error, never a reason to start from initial weights. Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_fp8.checkpoint.directory import CHECKPOINTS, TRACKER, CheckpointDirectory, find_directory
from megatron_fp8.checkpoint.manifest import MANIFEST, CheckpointError, find_corruption, read_manifest
from megatron_fp8.config.problem import ConfigError, Problem, first_few
from megatron_fp8.config.run_start import START, Holds, Position, Resume, Start, reopen_run_directory
from megatron_fp8.config.schema import Config


def choose_start(config: Config, resume: Resume | None, holds: Holds | None = None) -> Start:
    """What a run of `config` starts from. Raises ConfigError with the reason and what to use instead.

    `holds`: locks the choice against other jobs, and raises BadInputError if it cannot; None for a dry run. Raises
    OSError if the system refuses a path (`config/places.py` explains it).
    """
    settings = config.checkpoint
    if resume is not None and settings.load is not None:
        reason = "--resume continues the run's own checkpoints"
        raise _mistake("checkpoint.load", settings.load, reason, "only one of the two")
    if resume is not None:
        return _resume(config, resume, holds)
    if settings.load is not None:
        return _load(Path(settings.load), config, holds)
    if settings.ckpt_step is not None:
        reason = "neither checkpoint.load nor --resume is given, so nothing is loaded"
        raise _mistake("checkpoint.ckpt_step", settings.ckpt_step, reason, "--resume, or remove the key")
    return Start()


def _load(path: Path, config: Config, holds: Holds | None) -> Start:
    settings = config.checkpoint
    while True:
        directory = None if (path / MANIFEST).is_file() else find_directory(path)
        if directory is not None:
            checkpoint = _pick(directory, settings.ckpt_step, "checkpoint.load", str(path))
        elif (path / MANIFEST).is_file():
            checkpoint = path
        else:
            reason = "there is no checkpoint in it" if path.is_dir() else "there is no such directory"
            use = "the path of a run, of its checkpoints, or of one of them; or remove the key to start from scratch"
            raise _mistake("checkpoint.load", str(path), reason, use)
        # Otherwise its run has removed it meanwhile, and has a newer one.
        if holds is None or holds.checkpoint(checkpoint):
            break
    _require_intact(checkpoint, "checkpoint.load", str(path), directory)
    return start_from(Start(weights_only=settings.load_weights_only), checkpoint)


def _resume(config: Config, resume: Resume, holds: Holds | None) -> Start:
    run_directory = Path(config.run.root) / config.run.name
    exists = run_directory.is_dir()
    if exists and holds is not None:
        holds.run(reopen_run_directory(run_directory))
    directory = CheckpointDirectory(run_directory / CHECKPOINTS)
    iterations = directory.iterations()
    if not iterations:
        if resume == "auto":
            note = f"no checkpoint in {directory.root}: starting from initial weights"
            return Start(run_directory=run_directory if exists else None, may_fall_back=True, notes=(note,))
        reason = f"there is no checkpoint in {directory.root}, and --resume never starts from initial weights"
        raise _mistake("run.name", config.run.name, reason, "the name of a run that has one; or omit --resume")
    if resume == "latest":
        checkpoint = _pick(directory, config.checkpoint.ckpt_step, "run.name", config.run.name)
        _require_intact(checkpoint, "run.name", config.run.name, directory)
        return start_from(Start(run_directory, newest=iterations[-1]), checkpoint)
    newest, notes = _newest_intact(directory, config)
    start = Start(run_directory, may_fall_back=True, newest=iterations[-1], notes=tuple(notes))
    return start_from(start, directory.path(newest))


def _newest_intact(directory: CheckpointDirectory, config: Config) -> tuple[int, list[str]]:
    """The newest iteration with an intact checkpoint, by sizes, and notes on those that were skipped."""
    corrupt: list[str] = []
    for iteration in reversed(directory.iterations()):
        problems = list(find_corruption(directory.path(iteration), contents=False))
        if not problems:
            break
        corrupt.append(first_few(problems, "; "))
    else:
        reason = f"every checkpoint in {directory.root} is corrupt: {first_few(corrupt, '; ')}"
        raise _mistake("run.name", config.run.name, reason, "checkpoint.load with a copy of one")
    notes = []
    if corrupt or iteration != _tracked(directory):
        chosen = f"using iteration {iteration}, the newest intact checkpoint; {TRACKER} says {_tracked(directory)}"
        notes.append("; ".join([chosen, *corrupt]))
    return iteration, notes


def start_from(start: Start, checkpoint: Path) -> Start:
    """`start` from this checkpoint; reads its manifest."""
    manifest = read_manifest(checkpoint)
    position = START
    if not start.weights_only:
        counters = manifest.counters
        skipped = int(counters.get("skipped_samples", 0))
        position = Position(manifest.iteration, int(counters["consumed_samples"]), skipped)
    world_size = manifest.layout.get("world_size")
    start = replace(start, saved_config=manifest.config, saved_world_size=world_size)
    return replace(start, checkpoint=checkpoint, position=position)


def _tracked(directory: CheckpointDirectory) -> int | None:
    try:
        return directory.latest()
    except CheckpointError:
        return None


def _pick(directory: CheckpointDirectory, step: int | None, key: str, value: str) -> Path:
    """The checkpoint of iteration `step`, or the latest."""
    if step is None:
        try:
            step = directory.latest()
        except CheckpointError as error:
            raise _mistake(key, value, str(error), _other_choice(directory, None)) from error
        if step is None:
            reason = f"{directory.root / TRACKER} is missing"
            raise _mistake(key, value, reason, _other_choice(directory, None))
    if not directory.path(step).is_dir():
        iterations = directory.iterations()
        reason = f"there is no checkpoint of iteration {step} in {directory.root}; there are {iterations}"
        raise _mistake("checkpoint.ckpt_step", step, reason, f"checkpoint.ckpt_step={iterations[-1]}")
    return directory.path(step)


def _require_intact(checkpoint: Path, key: str, value: str, directory: CheckpointDirectory | None) -> None:
    problems = list(find_corruption(checkpoint, contents=False))
    if problems:
        before = directory.iteration(checkpoint) if directory is not None else None
        use = "another checkpoint" if directory is None else _other_choice(directory, before)
        raise _mistake(key, value, f"the checkpoint is corrupt: {'; '.join(problems)}", use)


def _other_choice(directory: CheckpointDirectory, before: int | None) -> str:
    newest = directory.newest_intact(before, contents=False)
    if newest is None:
        return "a copy of the checkpoint: no other one here is intact"
    return f"checkpoint.ckpt_step={newest}, the newest intact one; --resume=auto chooses it"


def _mistake(key: str, value: object, reason: str, use: str) -> ConfigError:
    return ConfigError.from_problems([Problem(key, value, reason, use)])
