"""Owns the keys of what a run writes about itself, and where. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_fp8.config.base import Section
from megatron_fp8.config.limits import MOST_STEPS
from megatron_fp8.config.place import Place


class LoggingConfig(Section):
    """What is written, and how often."""

    log_interval: int = Field(default=10, ge=1, le=MOST_STEPS)
    """Steps between records of `metrics.jsonl` and lines of the console log."""
    norms_interval: int | None = Field(default=None, ge=0, le=MOST_STEPS)
    """Steps between records of norms of gradients and weights by group of parameters; null: log_interval; 0: never."""
    tensorboard_dir: Annotated[str | None, Place.IN_RUN] = None
    """Directory of TensorBoard's files, a relative one inside the run directory; null: none are written."""
    wandb_project: str | None = None
    """Project in Weights & Biases that the run goes to; null: wandb is not used."""
    wandb_entity: str | None = None
    """User or team that the project belongs to; null: wandb's default."""
    wandb_exp_name: str | None = None
    """Name of the run in wandb; null: that of the run directory."""
    wandb_save_dir: Annotated[str | None, Place.IN_RUN] = None
    """Directory that wandb makes its `wandb` in, a relative one inside the run directory; null: the run directory."""
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    """offline: write files only, for `wandb sync` later; disabled: as without wandb_project."""
    wandb_group: str | None = None
    """Group of runs in wandb that this one belongs to."""
    wandb_tags: list[str] = Field(default_factory=list)
    """Tags of the run in wandb."""
    wandb_notes: str | None = None
    """What wandb shows as the run's description."""
