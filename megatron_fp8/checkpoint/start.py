"""Owns the choice of what a run starts from: nothing, its own latest checkpoint, or somebody else's.

Files are looked at, none is changed; contents are verified later, by all ranks together. Who acts on the choice
holds the run's directory, or the other run's checkpoint, from before it is looked at; who only looks holds nothing. A
path that holds no checkpoint is a mistake, never a reason to start from random weights. Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_fp8.checkpoint.directory import TRACKER, CheckpointDirectory
from megatron_fp8.checkpoint.manifest import MANIFEST, CheckpointError, damage, read_manifest
from megatron_fp8.config.problem import ConfigError, Problem
from megatron_fp8.config.rundir import reopen_run_directory
from megatron_fp8.config.schema import Config
from megatron_fp8.config.start import START, Holds, Position, Resume, Start

CHECKPOINTS = "checkpoints"
_MOST_DAMAGE_SHOWN = 4


def choose_start(config: Config, resume: Resume | None, holds: Holds | None = None) -> Start:
    """What a run of `config` starts from. Raises ConfigError with the reason and what to use instead.

    `holds`: protects the choice from other jobs, and raises BadInputError where it cannot; None for a dry run. Raises
    OSError where the system refuses a path (`config/places.py` has the words for it).
    """
    settings = config.checkpoint
    if resume is not None and settings.load is not None:
        reason = "--resume continues the run's own checkpoints"
        raise _mistake("checkpoint.load", settings.load, reason, "one of the two")
    if resume is not None:
        return _resume(config, resume, holds)
    if settings.load is not None:
        return _load(Path(settings.load), config, holds)
    if settings.ckpt_step is not None:
        reason = "there is nothing to load: neither checkpoint.load nor --resume is given"
        raise _mistake("checkpoint.ckpt_step", settings.ckpt_step, reason, "--resume, or leave the key out")
    return Start()


def _load(path: Path, config: Config, holds: Holds | None) -> Start:
    settings = config.checkpoint
    while True:
        found = _find_directory(path)
        directory = found if isinstance(found, CheckpointDirectory) else None
        if isinstance(found, CheckpointDirectory):
            checkpoint = _pick(found, settings.ckpt_step, "checkpoint.load", str(path))
        else:
            checkpoint = found
        # Gone: the run that it belongs to has removed it and has a newer one.
        if holds is None or holds.checkpoint(checkpoint):
            break
    _require_whole(checkpoint, "checkpoint.load", str(path), directory)
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
            note = f"no checkpoint in {directory.root}: starting from the initial weights"
            return Start(run_directory=run_directory if exists else None, may_fall_back=True, notes=(note,))
        reason = f"there is no checkpoint in {directory.root}, and --resume never starts from initial weights"
        raise _mistake("run.name", config.run.name, reason, "the name of a run that has one; or leave --resume out")
    if resume == "latest":
        checkpoint = _pick(directory, config.checkpoint.ckpt_step, "run.name", config.run.name)
        _require_whole(checkpoint, "run.name", config.run.name, directory)
        return start_from(Start(run_directory, newest=iterations[-1]), checkpoint)
    newest, notes = _newest_whole(directory, config)
    start = Start(run_directory, may_fall_back=True, newest=iterations[-1], notes=tuple(notes))
    return start_from(start, directory.path(newest))


def _newest_whole(directory: CheckpointDirectory, config: Config) -> tuple[int, list[str]]:
    """The newest whole iteration as far as sizes tell, and what a person should know of those that are passed over."""
    damaged: list[str] = []
    for iteration in reversed(directory.iterations()):
        problems = list(damage(directory.path(iteration), contents=False))
        if not problems:
            break
        damaged += _first(problems)
    else:
        reason = f"every checkpoint in {directory.root} is damaged: {'; '.join(_first(damaged))}"
        raise _mistake("run.name", config.run.name, reason, "a copy of one, as checkpoint.load")
    notes = []
    if damaged or iteration != _tracked(directory):
        taken = f"taking iteration {iteration}, the newest whole checkpoint; {TRACKER} says {_tracked(directory)}"
        notes.append("; ".join([taken, *damaged]))
    return iteration, notes


def _first(problems: list[str]) -> list[str]:
    more = len(problems) - _MOST_DAMAGE_SHOWN
    return [*problems[:_MOST_DAMAGE_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def start_from(start: Start, checkpoint: Path) -> Start:
    """`start` from that checkpoint, whose manifest is read."""
    manifest = read_manifest(checkpoint)
    position = START
    if not start.weights_only:
        counters = manifest.counters
        skipped = int(counters.get("skipped_samples", 0))
        position = Position(manifest.iteration, int(counters["consumed_samples"]), skipped)
    return replace(start, checkpoint=checkpoint, saved_config=manifest.config, position=position)


def _tracked(directory: CheckpointDirectory) -> int | None:
    try:
        return directory.latest()
    except CheckpointError:
        return None


def _find_directory(path: Path) -> CheckpointDirectory | Path:
    """The checkpoint itself, or the directory of checkpoints, that a path means."""
    if (path / MANIFEST).is_file():
        return path
    for candidate in (path, path / CHECKPOINTS):
        if CheckpointDirectory(candidate).iterations():
            return CheckpointDirectory(candidate)
    reason = "there is no checkpoint there" if path.is_dir() else "there is no such directory"
    use = "the path of a run, of its checkpoints, or of one of them; without the key a run starts from initial weights"
    raise _mistake("checkpoint.load", str(path), reason, use)


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


def _require_whole(checkpoint: Path, key: str, value: str, directory: CheckpointDirectory | None) -> None:
    problems = list(damage(checkpoint, contents=False))
    if problems:
        before = directory.iteration(checkpoint) if directory is not None else None
        use = "another checkpoint" if directory is None else _other_choice(directory, before)
        raise _mistake(key, value, f"the checkpoint is damaged: {'; '.join(problems)}", use)


def _other_choice(directory: CheckpointDirectory, before: int | None) -> str:
    newest = directory.newest_whole(before, contents=False)
    if newest is None:
        return "a copy of the checkpoint: no other one here is whole"
    return f"checkpoint.ckpt_step={newest}, the newest whole one, or --resume=auto, which takes it"


def _mistake(key: str, value: object, reason: str, use: str) -> ConfigError:
    return ConfigError.from_problems([Problem(key, value, reason, use)])
