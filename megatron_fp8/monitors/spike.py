"""Detects spikes of the training loss: how far above the recent losses, for how many steps.

What is normal is said by the median and the median absolute deviation (MAD) of the newest losses. Single outliers
change neither, while they would pull a mean up and widen a standard deviation until the next spike is not seen. A loss
that falls leaves the median above it, so that falling is never taken for a spike. Every rank sees the same losses and
decides alike. Must not know where losses come from or what is done about a spike. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from megatron_fp8.config.schema_run import FaultsConfig

# Of a normal distribution the standard deviation is so many MADs.
_STANDARD_DEVIATION_IN_MADS = 1.4826
# Of losses that hardly differ not every rise is a spike: the least deviation, as a share of the median.
_LEAST_DEVIATION = 0.005
_NORMAL, _SUSPECTS = "recent_losses", "suspected_steps"


@dataclass
class RecentLosses:
    """What a decision depends on, part of a run's progress.

    `normal`: the newest losses, oldest first, in nats per token. `suspects`: the iterations of the newest steps in a
    row whose loss was above the limit.
    """

    normal: list[float] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)

    def as_lists(self) -> dict[str, list[float]]:
        """Plain data by name, without empty lists."""
        lists: dict[str, list[float]] = {_NORMAL: list(self.normal), _SUSPECTS: [*self.suspects]}
        return {name: values for name, values in lists.items() if values}

    @classmethod
    def from_lists(cls, lists: Mapping[str, Sequence[float]]) -> RecentLosses:
        """From `as_lists`, with other names among them; nothing, of a checkpoint of an earlier version."""
        return cls(list(lists.get(_NORMAL, [])), [int(iteration) for iteration in lists.get(_SUSPECTS, [])])


@dataclass(frozen=True)
class Spike:
    """A spike: iteration of its first step and of the newest one, the newest loss, what was normal, what was allowed.

    All but iterations in nats per token.
    """

    began: int
    iteration: int
    loss: float
    median: float
    limit: float

    def __str__(self) -> str:
        since = "" if self.began == self.iteration else f", since iteration {self.began}"
        return (
            f"lm loss {self.loss:.4f} at iteration {self.iteration} is above {self.limit:.4f}{since}; "
            f"the median before was {self.median:.4f}"
        )


class SpikeDetector:
    """Finds spikes as `settings` say."""

    def __init__(self, settings: FaultsConfig) -> None:
        self._settings = settings

    def observe(self, recent: RecentLosses, iteration: int, loss: float) -> Spike | None:
        """Take the loss of a step into `recent`; the spike, at the step that makes it one.

        After a spike nothing is normal until as many losses as at the start of a run have been seen: one spike is told
        once, however long the loss stays high.
        """
        settings = self._settings
        if len(recent.normal) < settings.spike_window:
            recent.normal.append(loss)
            return None
        middle = median(recent.normal)
        mad = median(abs(each - middle) for each in recent.normal)
        deviation = max(_STANDARD_DEVIATION_IN_MADS * mad, _LEAST_DEVIATION * abs(middle))
        limit = middle + settings.spike_threshold * deviation
        if loss <= limit:
            recent.suspects.clear()
            recent.normal.append(loss)
            del recent.normal[0]
            return None
        recent.suspects.append(iteration)
        large = loss > middle + settings.spike_large_threshold * deviation
        if not large and len(recent.suspects) < settings.spike_num_steps:
            return None
        spike = Spike(recent.suspects[0], iteration, loss, middle, limit)
        recent.suspects.clear()
        recent.normal.clear()
        return spike
