"""Owns when delayed scales are computed, and which amaxes they are computed from.

The formula is TE's (`quantization._default_sf_compute`): scale = FP8 maximum / amax / 2^margin, from the maximum or
the newest entry of the history. Its degenerate inputs, of one amax a step:

- 0, nothing seen or all zero: the scale stays.
- so small that the quotient overflows FP32: the largest FP32 value.
- NaN or infinite, on any rank and in any micro-batch: it counts as nothing seen. TE keeps the scale of such a step
  too, but lets an infinite amax into the history, where `max` would find it, and keep the scale, for as many steps
  as the history is long.

Must not know modules or policies.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, _default_sf_compute


class DelayedScales:
    """Updates every scale at the end of each step, or (histories aside) of each `interval`-th step.

    `num_updates`: steps that were finished, skipped ones not counted.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self.num_updates = 0

    def finish_step(self, running_amaxes: Sequence[Tensor], skipped: bool) -> None:
        """Move the histories on and compute scales; `running_amaxes` are the histories' first rows.

        A skipped step's amaxes are forgotten. Collective over the ranks that reduce amaxes.
        """
        if skipped:
            for amax in running_amaxes:
                amax.zero_()
            return
        _forget_non_finite(running_amaxes)
        self.num_updates += 1
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)

    def compute(self, amax: Tensor, scale: Tensor, fp8_max: float, recipe: DelayedScaling) -> Tensor:
        """TE's formula on every `interval`-th step, the old scale on the others."""
        if self.num_updates % self._interval:
            return scale
        return _default_sf_compute(amax, scale, fp8_max, recipe.margin)


def _forget_non_finite(amaxes: Sequence[Tensor]) -> None:
    """Set NaN and infinite entries to 0, in place."""
    if not amaxes:
        return
    together = torch.cat(list(amaxes)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    torch._foreach_copy_(list(amaxes), list(together.split([amax.numel() for amax in amaxes])))
