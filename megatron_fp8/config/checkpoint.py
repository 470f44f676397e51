"""Owns the `checkpoint` section of the config: when checkpoints are written, which stay, what a run starts from.

Imports no torch.
"""

from typing import Annotated

from pydantic import Field

from megatron_fp8.config.base import Section
from megatron_fp8.config.limits import MOST_MINUTES, MOST_STEPS
from megatron_fp8.config.place import Place


class CheckpointConfig(Section):
    """Checkpoints in the run directory, and what a new run starts from."""

    save: bool = True
    """Write checkpoints: every save_interval steps, at the end, and when the run is told to stop."""
    save_interval: int = Field(default=1000, ge=0, le=MOST_STEPS)
    """Optimizer steps between checkpoints; 0: only at the end and when told to stop."""
    save_retain_interval: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Checkpoints of multiples of this many steps are never removed; null: keep_last alone decides."""
    keep_last: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Remove all but this many of the newest checkpoints; null: all stay."""
    async_save: bool = True
    """Write in the background: the step that saves waits for the copy of the state only."""
    exit_interval: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Save and end after a step whose number is a multiple of this (exit code 75)."""
    exit_duration_in_mins: float | None = Field(default=None, gt=0, le=MOST_MINUTES)
    """Save and end once the run has lasted this many minutes (exit code 75)."""
    load: Annotated[str | None, Place.CHECKPOINTS] = None
    """Start a new run from a checkpoint: path of one, of a directory of them, or of a run directory."""
    load_weights_only: bool = False
    """Take only the weights from `load`: moments, schedule, counters and data start anew, as for a fine-tuning."""
    ckpt_step: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Iteration to load, with `load` or --resume; null: the latest."""
    override_opt_param_scheduler: bool = False
    """Let learning rates, schedule and weight decay of this config replace those of the loaded run."""
