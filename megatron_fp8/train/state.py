"""Owns the counters of a run as plain data. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainState:
    """How far a run has come: optimizer steps, samples and tokens consumed by them, steps that changed no weights.

    A skipped step counts as an iteration, and its samples as consumed.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    skipped_iterations: int = 0

    def after_step(self, num_samples: int, seq_length: int, skipped: bool = False) -> "TrainState":
        """The counters one optimizer step later."""
        return TrainState(
            iteration=self.iteration + 1,
            consumed_samples=self.consumed_samples + num_samples,
            consumed_tokens=self.consumed_tokens + num_samples * seq_length,
            skipped_iterations=self.skipped_iterations + skipped,
        )
