"""What all config sections have in common (frozen, no unknown keys, documented fields), and small sections.

Imports no torch.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from megatron_fp8.config.limits import (
    MAX_FACTOR,
    MAX_MINUTES,
    MAX_STEPS,
    MAX_THRESHOLD,
    MAX_WINDOW,
    MIN_MINUTES,
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
    """Save checkpoints: every save_interval steps, at the end, and when the run is stopped by a signal."""
    save_interval: int = Field(default=1000, ge=0, le=MAX_STEPS)
    """Optimizer steps between checkpoints; 0: only at the end and when stopped."""
    save_retain_interval: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Never remove checkpoints at multiples of this many steps; null: keep_last alone decides."""
    keep_last: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Number of newest checkpoints to keep; null: all."""
    async_save: bool = True
    """Write in the background: training only waits for the copy of the state."""
    exit_interval: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Save and exit after a step that is a multiple of this (exit code 75)."""
    exit_duration_in_mins: float | None = Field(default=None, gt=0, le=MAX_MINUTES)
    """Save and exit once the job has run for this many minutes (exit code 75)."""
    load: Annotated[str | None, Place.CHECKPOINTS] = None
    """Start a new run from a checkpoint: path of one, of a directory of them, or of a run directory."""
    load_weights_only: bool = False
    """Load only the weights: moments, schedule, counters and data start from scratch, as for fine-tuning."""
    ckpt_step: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Iteration to load, with `load` or --resume; null: the latest."""
    override_opt_param_scheduler: bool = False
    """Use the learning rates, schedule and weight decay of this config instead of those of the loaded run."""


class FaultsConfig(Section):
    """What to do about bad steps, hangs, stragglers and corrupt replicas; see `docs/faults.md`."""

    nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    """On NaN or infinity in the loss or gradients: end the run, skip the step, or roll back to a checkpoint."""
    nonfinite_max_skips_in_a_row: int = Field(default=3, ge=1, le=MAX_STEPS)
    """With nonfinite=skip: most consecutive steps to skip; one more ends the run."""
    nonfinite_max_skips: int = Field(default=100, ge=1, le=MAX_STEPS)
    """With nonfinite=skip: most steps to skip in the whole run; one more ends it."""
    spike: Literal["off", "warn", "rewind"] = "warn"
    """On a spike of the training loss: nothing, a warning event, or a rollback to a checkpoint."""
    spike_window: int = Field(default=128, ge=8, le=MAX_WINDOW)
    """Steps whose losses define what is normal, by median and median absolute deviation; no spike before as many."""
    spike_threshold: float = Field(default=6.0, gt=0, le=MAX_THRESHOLD)
    """Robust standard deviations that a loss may be above the median."""
    spike_num_steps: int = Field(default=5, ge=1, le=MAX_STEPS)
    """Consecutive steps with a loss above spike_threshold that make a spike."""
    spike_large_threshold: float = Field(default=30.0, gt=0, le=MAX_THRESHOLD)
    """Robust standard deviations above the median at which a single loss is a spike."""
    max_rewinds: int = Field(default=3, ge=1, le=MAX_STEPS)
    """Most rollbacks of a run; one more ends it."""
    hang_timeout_minutes: float | None = Field(default=None, ge=0, le=MAX_MINUTES)
    """Minutes without progress after which a job ends and the hanging rank is named; null: half of
    parallel.distributed_timeout_minutes; 0: no hang detection."""
    hang_timeout_slow_minutes: float | None = Field(default=60.0, ge=MIN_MINUTES, le=MAX_MINUTES)
    """The same while a run loads, saves, or makes its first step; null: no limit."""
    replica_check_interval: int = Field(default=1000, ge=0, le=MAX_STEPS)
    """Steps between bitwise comparisons of replicas across ranks; a difference ends the run; 0: never."""
    slow_rank_factor: float | None = Field(default=1.5, gt=1, le=MAX_FACTOR)
    """A rank whose own work takes this many times the median of its peers is a straggler; null: no detection."""
    slow_rank_intervals: int = Field(default=3, ge=1, le=MAX_STEPS)
    """Consecutive log intervals in which a rank must be that slow to be named."""


class LoggingConfig(Section):
    """What is logged, and how often."""

    log_interval: int = Field(default=10, ge=1, le=MAX_STEPS)
    """Steps between records of `metrics.jsonl` and lines of the console log."""
    norms_interval: int | None = Field(default=None, ge=0, le=MAX_STEPS)
    """Steps between records of gradient and weight norms by parameter group; null: log_interval; 0: never."""
    tensorboard_dir: Annotated[str | None, Place.IN_RUN] = None
    """TensorBoard directory, relative to the run directory; null: no TensorBoard."""
    wandb_project: str | None = None
    """Weights & Biases project; null: no wandb."""
    wandb_entity: str | None = None
    """wandb user or team; null: wandb's default."""
    wandb_exp_name: str | None = None
    """Name of the run in wandb; null: that of the run directory."""
    wandb_save_dir: Annotated[str | None, Place.IN_RUN] = None
    """Directory in which wandb creates `wandb/`, relative to the run directory; null: the run directory."""
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    """offline: only write files, for a later `wandb sync`; disabled: as without wandb_project."""
    wandb_group: str | None = None
    """Group of the run in wandb."""
    wandb_tags: list[str] = Field(default_factory=list)
    """Tags of the run in wandb."""
    wandb_notes: str | None = None
    """Description of the run in wandb."""


class ProfileConfig(Section):
    """A trace of a few steps by torch's profiler, in the run directory's `profile`."""

    start: int | None = Field(default=None, ge=0, le=MAX_STEPS)
    """Steps done when tracing begins; null: none are traced."""
    stop: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Steps done when tracing ends: the steps start + 1 to stop are traced."""
    ranks: list[int] = Field(default_factory=lambda: [0])
    """Ranks to trace, one file each."""
    record_shapes: bool = False
    """Record the input shapes of every operation."""
    profile_memory: bool = False
    """Record the memory that every operation allocates and frees."""
    with_stack: bool = False
    """Record the Python source lines of every operation; slows the traced steps."""
