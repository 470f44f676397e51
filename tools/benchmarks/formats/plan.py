"""What is known before the first process: the modes, whether each one's config is right, and the runs. Imports no torch
until a torchao mode asks what its model supports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.formats.comparison import RunTask
from megatron_fp8.config.check import check_config
from megatron_fp8.config.load import LoadedConfig, load_config
from megatron_fp8.config.problem import ConfigError, Problem
from megatron_fp8.config.run_start import resolve_length
from megatron_fp8.data.check_data import check_data
from megatron_fp8.errors import BadInputError
from megatron_fp8.precision.policy import Fp8Recipe

# Training losses are compared: of the same samples in every mode.
_NO_EVALUATION = "training.eval_iters=0"
_MAKE_DATA = "The data of configs/compare.yaml is made by: python tools/prepare_quickstart.py --output data/quickstart"


@dataclass(frozen=True)
class Mode:
    """One way to compute. `torchao_recipe`: torchao's FP8 in the plain-PyTorch model; None: this project's own step."""

    name: str
    precision: str
    fp8_recipe: Fp8Recipe | None = None
    torchao_recipe: Literal["tensorwise", "rowwise"] | None = None

    @property
    def overrides(self) -> tuple[str, ...]:
        """As on a command line."""
        recipe = () if self.fp8_recipe is None else (f"precision.fp8_recipe={self.fp8_recipe}",)
        return (f"precision.mode={self.precision}", *recipe)


# Outside the blocks torchao's runs are BF16, so that is the mode of their config.
MODES = {
    mode.name: mode
    for mode in (
        Mode("fp32", "fp32"),
        Mode("bf16", "bf16"),
        Mode("fp16", "fp16"),
        Mode("fp8-delayed", "fp8", "delayed"),
        Mode("fp8-tensorwise", "fp8", "tensorwise"),
        Mode("fp8-blockwise", "fp8", "blockwise"),
        Mode("fp8-mxfp8", "fp8", "mxfp8"),
        Mode("torchao-tensorwise", "bf16", torchao_recipe="tensorwise"),
        Mode("torchao-rowwise", "bf16", torchao_recipe="rowwise"),
    )
}


def default_reference(modes: Sequence[str]) -> str:
    """What the others are compared with: fp32 if it is among `modes`, else bf16, else the first."""
    return next((name for name in ("fp32", "bf16") if name in modes), modes[0])


class PlanError(BadInputError):
    """A mode's config is wrong; the text has every mistake, and in which modes."""


@dataclass(frozen=True)
class Plan:
    """What is compared. `base`: the config without a mode; `overrides`: those of every run but mode and seed."""

    path: Path
    base: LoadedConfig
    overrides: tuple[str, ...]
    modes: tuple[str, ...]
    seeds: tuple[int, ...]

    def tasks(self, directory: Path, num_threads: int) -> list[RunTask]:
        """Every run, seed by seed, so that an interrupted comparison has looked at all modes."""
        return [
            RunTask(
                mode=mode,
                seed=seed,
                config=self.path,
                overrides=(*self.overrides, *MODES[mode].overrides, f"training.seed={seed}"),
                samples=samples_file(directory, seed),
                num_threads=num_threads,
            )
            for seed in self.seeds
            for mode in self.modes
        ]


@dataclass(frozen=True)
class Preparation:
    """What is known before the first run: the device in words, and why it cannot run a mode."""

    device: str
    unsupported: Mapping[str, str]


@dataclass(frozen=True)
class PrepareTask:
    """`files`: by seed, the file to write."""

    config: Path
    overrides: tuple[str, ...]
    files: Mapping[int, Path]


def samples_file(directory: Path, seed: int) -> Path:
    """Where the samples of a seed are kept."""
    return directory / f"samples-{seed}.pt"


def make_plan(path: Path, overrides: Sequence[str], modes: Sequence[str], num_seeds: int) -> Plan:
    """The plan of `num_seeds` seeds from `training.seed` on. Raises PlanError, or ConfigError for the file itself."""
    overrides = [*overrides, _NO_EVALUATION]
    base = load_config(path, overrides)
    data = check_data(base.config)
    given = base
    base, mistakes_of_length = resolve_length(given, data.epoch_samples)
    if base is not given:
        # What derives it looks at files; the runs' processes do not.
        overrides = [*overrides, f"training.train_iters={base.config.training.train_iters}"]
    if base.config.model.vocab_size is None and data.vocab_size is not None:
        # torchao's model has no tokenizer to ask.
        overrides = [*overrides, f"model.vocab_size={data.vocab_size}"]
    # By what a person reads, the modes in which it was found.
    found: dict[str, list[str]] = {str(problem): [] for problem in [*data.problems, *mistakes_of_length]}
    for mode in modes:
        for problem in _mode_problems(path, overrides, mode, data.vocab_size):
            found.setdefault(str(problem), []).append(mode)
    if found:
        hint = f"\n{_MAKE_DATA}" if data.problems else ""
        raise PlanError(_text(found, len(modes)) + hint)
    first = base.config.training.seed
    return Plan(path, base, tuple(overrides), tuple(modes), tuple(range(first, first + num_seeds)))


def _mode_problems(path: Path, overrides: Sequence[str], mode: str, vocab_size: int | None) -> Iterator[Problem]:
    try:
        loaded = load_config(path, [*overrides, *MODES[mode].overrides])
    except ConfigError as error:
        yield from error.problems
        return
    yield from check_config(loaded, 1, vocab_size)
    if MODES[mode].torchao_recipe is None:
        return
    from benchmarks.plain_model import require_supported

    try:
        require_supported(loaded.config.model)
    except NotImplementedError as error:
        yield Problem("--modes", mode, str(error), "a config of that kind, or --modes without torchao's")
    for name, reason in (
        ("eod_mask_loss", "the model that torchao converts counts every token"),
        ("reset_position_ids", "the model that torchao converts counts positions through the sample"),
        ("reset_attention_mask", "the model that torchao converts attends to the whole sample"),
    ):
        if getattr(loaded.config.data, name):
            yield Problem(f"data.{name}", True, reason, f"data.{name}=false, or --modes without torchao's")


def _text(found: dict[str, list[str]], num_modes: int) -> str:
    lines = []
    for text, modes in found.items():
        everywhere = len(modes) in (0, num_modes)
        lines.append(text if everywhere else f"in {', '.join(modes)}: {text}")
    count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
    return "\n".join([f"{count} in the comparison:", *lines])
