"""Owns the keys of a trace of a few steps by torch's profiler. Imports no torch."""

from pydantic import Field

from megatron_fp8.config.base import Section
from megatron_fp8.config.limits import MOST_STEPS


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
