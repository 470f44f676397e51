"""Owns what every config section has in common: frozen, no unknown keys, fields documented in place.

Imports no torch.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_fp8.config.limits import (
    MOST_FACTOR,
    MOST_MINUTES,
    MOST_STEPS,
    MOST_THRESHOLD,
    MOST_WINDOW,
    SHORTEST_MINUTES,
    Place,
)


class Section(BaseModel):
    """A frozen group of config keys; unknown keys, infinities and NaN are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        strict=False,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


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


class FaultsConfig(Section):
    """What is done about steps that go wrong; for users: `docs/faults.md`."""

    nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    """At NaN or infinity in loss or gradients: end the run, leave the step out, or go back to a checkpoint."""
    nonfinite_max_skips_in_a_row: int = Field(default=3, ge=1, le=MOST_STEPS)
    """With nonfinite=skip: end the run when this many steps in a row were left out and the next is not finite."""
    nonfinite_max_skips: int = Field(default=100, ge=1, le=MOST_STEPS)
    """With nonfinite=skip: the same for this many steps of the whole run."""
    spike: Literal["off", "warn", "rewind"] = "warn"
    """At a spike of the training loss: nothing, a warning in the record, or go back to a checkpoint."""
    spike_window: int = Field(default=128, ge=8, le=MOST_WINDOW)
    """Steps whose losses say what is normal, by median and median absolute deviation; none is told before as many."""
    spike_threshold: float = Field(default=6.0, gt=0, le=MOST_THRESHOLD)
    """Robust standard deviations above the median that a loss may have."""
    spike_num_steps: int = Field(default=5, ge=1, le=MOST_STEPS)
    """Steps in a row with a loss above spike_threshold that make a spike."""
    spike_large_threshold: float = Field(default=30.0, gt=0, le=MOST_THRESHOLD)
    """Robust standard deviations above the median from which a single loss makes a spike."""
    max_rewinds: int = Field(default=3, ge=1, le=MOST_STEPS)
    """How often a run may go back to a checkpoint in all; then a further cause ends it."""
    hang_timeout_minutes: float | None = Field(default=None, ge=0, le=MOST_MINUTES)
    """Minutes without progress after which a job ends that a rank holds up, which is named; null: half of
    parallel.distributed_timeout_minutes; 0: none is looked for."""
    hang_timeout_slow_minutes: float | None = Field(default=60.0, ge=SHORTEST_MINUTES, le=MOST_MINUTES)
    """The same while a run loads, saves, or makes its first step; null: as long as it takes."""
    replica_check_interval: int = Field(default=1000, ge=0, le=MOST_STEPS)
    """Steps between comparisons of what several ranks hold alike, bit for bit; a difference ends the run; 0: none."""
    slow_rank_factor: float | None = Field(default=1.5, gt=1, le=MOST_FACTOR)
    """Name a rank whose own work takes so many times as long as that of the ranks which do the same; null: none."""
    slow_rank_intervals: int = Field(default=3, ge=1, le=MOST_STEPS)
    """Log intervals in a row in which a rank must be slow to be named."""


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


class ProfileConfig(Section):
    """A trace of a few steps by torch's profiler, in the run directory's `profile`."""

    start: int | None = Field(default=None, ge=0, le=MOST_STEPS)
    """Steps done when tracing begins; null: none are traced."""
    stop: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Steps done when tracing ends: the steps start + 1 to stop are traced."""
    ranks: list[int] = Field(default_factory=lambda: [0])
    """Ranks that are traced, each into a file of its own."""
    record_shapes: bool = False
    """Note the shapes of every operation's inputs."""
    profile_memory: bool = False
    """Note what every operation takes and frees of memory."""
    with_stack: bool = False
    """Note the lines of Python that every operation comes from; slows the traced steps down."""
