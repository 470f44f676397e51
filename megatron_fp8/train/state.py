"""Owns the counters of a run as plain data. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from megatron_fp8.config.run_start import Position

# Counters that checkpoints of earlier versions do not have, and what they were then.
_ADDED_LATER = {
    "overflows_in_a_row": 0,
    "nonfinite_skips_in_a_row": 0,
    "nonfinite_skips": 0,
    "rewinds": 0,
    "skipped_samples": 0,
}


@dataclass(frozen=True)
class TrainState:
    """How far a run has come: optimizer steps, samples and tokens consumed by them, steps that changed no weights.

    A skipped step counts as an iteration, and its samples as consumed. `overflows_in_a_row`: those of
    `LossScaling`. `nonfinite_skips`: steps that were skipped because loss or gradients were not finite, of the whole
    run. `rewinds`: how often the run went back to a checkpoint. `skipped_samples`: those of the consumed samples, but
    not of the consumed tokens, that rewinding passed over; no step that counts has read them.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_iterations: int = 0
    overflows_in_a_row: int = 0
    nonfinite_skips_in_a_row: int = 0
    nonfinite_skips: int = 0
    rewinds: int = 0
    skipped_samples: int = 0

    def after_step(
        self,
        num_samples: int,
        seq_length: int,
        skipped: bool = False,
        overflows_in_a_row: int = 0,
        nonfinite: bool = False,
    ) -> "TrainState":
        """The counters one optimizer step later; `nonfinite`: it was skipped for that."""
        return replace(
            self,
            iteration=self.iteration + 1,
            consumed_samples=self.consumed_samples + num_samples,
            consumed_tokens=self.consumed_tokens + num_samples * seq_length,
            skipped_iterations=self.skipped_iterations + skipped,
            overflows_in_a_row=overflows_in_a_row,
            nonfinite_skips_in_a_row=self.nonfinite_skips_in_a_row + 1 if nonfinite else 0,
            nonfinite_skips=self.nonfinite_skips + nonfinite,
        )

    def after_rewind(self, reached: "TrainState") -> "TrainState":
        """The counters of a checkpoint, to go on from behind the samples that were consumed when the run had `reached`
        the end of what is passed over."""
        return replace(
            self,
            consumed_samples=reached.consumed_samples,
            skipped_samples=self.skipped_samples + reached.consumed_samples - self.consumed_samples,
            rewinds=reached.rewinds + 1,
        )

    @property
    def position(self) -> Position:
        """Where in its steps and samples the run is."""
        return Position(self.iteration, self.consumed_samples, self.skipped_samples)

    def as_counters(self) -> dict[str, int]:
        """The counters by name."""
        return asdict(self)

    @classmethod
    def from_counters(cls, counters: Mapping[str, float]) -> "TrainState":
        """From `as_counters`, with other names among them. Raises KeyError for a counter that is missing."""
        known = {**_ADDED_LATER, **counters}
        return cls(**{field.name: int(known[field.name]) for field in fields(cls)})
