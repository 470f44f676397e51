"""Finds a checkpoint's model, and makes the config to run it with, before torch is imported.

The model's sizes come from the checkpoint; the number of ranks and the number format may differ from the run that made
it. Every mistake is found here, before any weights are read. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import yaml
from pydantic import ValidationError

from megatron_fp8.checkpoint.directory import CHECKPOINTS, TRACKER, find_directory, locked_choice
from megatron_fp8.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, find_corruption, read_manifest
from megatron_fp8.checkpoint.plain_index import MASTER, PRECISION, read_plain_index
from megatron_fp8.config.facts import Facts, Finding, to_problem
from megatron_fp8.config.problem import ConfigError, Problem
from megatron_fp8.config.rules_model import check_model
from megatron_fp8.config.rules_parallel import check_parallel
from megatron_fp8.config.rules_precision import check_precision
from megatron_fp8.config.schema import Config, ParallelConfig
from megatron_fp8.config.schema_model import PrecisionConfig
from megatron_fp8.errors import BadInputError

_EMBEDDING = "embedding.word_embeddings.weight"
_FALLEN_BACK = "fallen_back"
# Keys that can still be chosen for a given model; others are not suggested.
_CHOICES = (
    "world_size",
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "precision.mode",
    "precision.fp8_recipe",
    "training.micro_batch_size",
)
_TRAINING_ONLY = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


@dataclass(frozen=True)
class InferenceSettings:
    """How to run a checkpoint's model; None: as in the run that made it.

    The data-parallel size follows from the world size. `fp8_recipe`: `delayed` needs the scales that an FP8 run saved.
    `micro_batch_size`: samples of one forward pass; `num_microbatches`: passes per data-parallel rank that a `Stepper`
    makes at a time.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    mode: Literal["fp32", "fp16", "bf16", "fp8"] | None = None
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    micro_batch_size: int | None = None
    num_microbatches: int = 1


@dataclass(frozen=True)
class SavedModel:
    """A model in a checkpoint, and how to run it.

    `config`: the run's, changed by the settings for inference; `vocab_size`: without padding.
    """

    checkpoint: Path
    manifest: Manifest
    config: Config
    vocab_size: int

    @property
    def fallen_back(self) -> list[int]:
        """Layers that had fallen back to BF16 when the checkpoint was saved."""
        return self.manifest.lists.get(_FALLEN_BACK, [])

    @property
    def num_positions(self) -> int:
        """Maximum tokens of a text: rows of the position table, or with RoPE the sequence length of training."""
        model = self.config.model
        rows = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else None
        return rows or model.seq_length


def read_saved_model(path: Path, settings: InferenceSettings, world_size: int) -> SavedModel:
    """The model at `path` (see `find_checkpoint`), to run on `world_size` ranks.

    Raises BadInputError with every mistake, CheckpointError if the checkpoint is corrupt, by sizes.
    """
    checkpoint = find_checkpoint(path)
    problems = list(find_corruption(checkpoint, contents=False))
    if problems:
        raise CheckpointError(f"the checkpoint is corrupt: {'; '.join(problems)}")
    index = read_plain_index(checkpoint)
    embedding = index.get(MASTER + _EMBEDDING)
    if embedding is None:
        raise CheckpointError(f"{checkpoint} has no {MASTER}{_EMBEDDING}: it is not a checkpoint of a model")
    vocab_size = embedding.shape[0]
    config = _for_inference(read_config(checkpoint), settings, world_size, vocab_size)
    has_scales = any(name.startswith(f"{PRECISION}layers.") for name in index)
    _require_fitting(config, world_size, has_scales)
    return SavedModel(checkpoint, read_manifest(checkpoint), config, vocab_size)


def find_checkpoint(path: Path, iteration: int | None = None) -> Path:
    """The checkpoint at `path`, or that of `iteration` (None: the latest) in the run or directory at `path`.

    `path` may also be the tracker file. Raises BadInputError if there is no checkpoint.
    """
    if path.name == TRACKER and path.is_file():
        path = path.parent
    if (path / MANIFEST).is_file():
        return path
    directory = find_directory(path)
    if directory is None:
        what = f"a run directory, its {CHECKPOINTS} directory, or one of the checkpoints in it"
        raise BadInputError(f"there is no checkpoint at {path}\n    use: {what}")
    iterations = directory.iterations()
    chosen = directory.latest() if iteration is None else iteration
    if chosen is not None and not directory.path(chosen).is_dir():
        raise BadInputError(f"there is no checkpoint of iteration {chosen} in {directory.root}; there are {iterations}")
    return directory.path(iterations[-1] if chosen is None else chosen)


def kept_checkpoint(path: Path, iteration: int | None = None) -> AbstractContextManager[Path]:
    """The result of `find_checkpoint`, locked so that a run that is training does not remove it."""
    return locked_choice(partial(find_checkpoint, path, iteration))


def read_config(checkpoint: Path) -> Config:
    """The config of the run that wrote a checkpoint. Raises BadInputError if it cannot be read."""
    try:
        return Config.model_validate(yaml.safe_load(read_manifest(checkpoint).config))
    except (ValidationError, yaml.YAMLError) as error:
        raise BadInputError(f"the config in {checkpoint / MANIFEST} cannot be read: {error}") from error


def _for_inference(saved: Config, settings: InferenceSettings, world_size: int, vocab_size: int) -> Config:
    tp, pp = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        distributed_timeout_minutes=saved.parallel.distributed_timeout_minutes,
    )
    micro = settings.micro_batch_size or saved.training.micro_batch_size
    batch = micro * settings.num_microbatches * max(1, world_size // (tp * pp))
    training = saved.training.model_copy(update={"micro_batch_size": micro, "global_batch_size": batch})
    model = saved.model.model_copy(
        update={"vocab_size": vocab_size, "recompute_granularity": "none", "recompute_num_layers": None}
    )
    precision = _precision(saved.precision, settings)
    return saved.model_copy(update={"model": model, "parallel": parallel, "training": training, "precision": precision})


def _precision(saved: PrecisionConfig, settings: InferenceSettings) -> PrecisionConfig:
    """The formats of the run, changed by the settings, without those that only training uses."""
    mode = settings.mode or ("fp8" if settings.fp8_recipe is not None else saved.mode)
    if mode != "fp8":
        return PrecisionConfig(mode=mode)
    defaults = PrecisionConfig()
    changes = {key: getattr(defaults, key) for key in _TRAINING_ONLY}
    # No scale is updated, so the ranks that reduce amaxes do not matter.
    changes |= {"mode": mode, "amax_reduction": "auto", "from_accelerate": None}
    if settings.mode is not None:
        changes["fp8_eval"] = True
    if settings.fp8_recipe not in (None, saved.fp8_recipe):
        changes |= {"fp8_recipe": settings.fp8_recipe, "fp8_format": None}
    return saved.model_copy(update=changes)


def _require_fitting(config: Config, world_size: int, has_scales: bool) -> None:
    """Raise ConfigError with every mistake between the model, the ranks and the number format."""
    facts = Facts(config, world_size, config.model.vocab_size)
    problems = [to_problem(_with_choices(finding), facts, _findings, {}) for finding in _findings(facts)]
    precision = config.precision
    if precision.mode == "fp8" and precision.fp8_recipe == "delayed" and not has_scales:
        reason = "delayed scaling needs the scales of an FP8 run, and the checkpoint has none"
        use = "precision.fp8_recipe=tensorwise, which scales each tensor by its own amax; or precision.mode=bf16"
        problems.append(Problem("precision.fp8_recipe", "delayed", reason, use))
    if problems:
        raise ConfigError.from_problems(problems)


def _findings(facts: Facts) -> Iterator[Finding]:
    yield from check_model(facts)
    yield from check_parallel(facts)
    yield from check_precision(facts)


def _with_choices(finding: Finding) -> Finding:
    fitting = tuple(alternative for alternative in finding.alternatives if alternative.key in _CHOICES)
    return replace(finding, alternatives=fitting)
