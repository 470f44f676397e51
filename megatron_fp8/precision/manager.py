"""Owns number formats at run time: which region computes in FP8, and when scales are updated.

Scales are updated once per optimizer step, after the last micro-batch, and not (as Transformer Engine does by
itself) at the end of every micro-batch: the amax of a step is then the maximum over all its micro-batches, however
they are divided over ranks, and the parallel layout does not change the scales. Must not know models, configs or
how ranks were started.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import transformer_engine.pytorch as te
from torch import nn
from torch.distributed import ProcessGroup
from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megatron_fp8.precision.recipe import DelayedScalingPolicy, PrecisionPolicy
from megatron_fp8.precision.state import scaling_states

_TE_FORMATS = {"hybrid": Format.HYBRID, "e4m3": Format.E4M3}


def te_recipe(policy: DelayedScalingPolicy, reduce_amax: bool) -> DelayedScaling:
    """Transformer Engine's recipe for the policy."""
    return DelayedScaling(
        margin=policy.margin,
        fp8_format=_TE_FORMATS[policy.fp8_format],
        amax_history_len=policy.amax_history_len,
        amax_compute_algo=policy.amax_compute_algo,
        reduce_amax=reduce_amax,
    )


class PrecisionManager:
    """Applies a `PrecisionPolicy` on this rank; `amax_group` None: amaxes are not reduced."""

    def __init__(self, policy: PrecisionPolicy, amax_group: ProcessGroup | None) -> None:
        self.policy = policy
        self.params_dtype: torch.dtype = getattr(torch, policy.params_dtype)
        self._amax_group = amax_group
        self._recipe = None
        if policy.delayed is not None:
            self._recipe = te_recipe(policy.delayed, reduce_amax=amax_group is not None)

    @property
    def uses_fp8(self) -> bool:
        """Whether the blocks' GEMMs run in FP8."""
        return self._recipe is not None

    def blocks(self) -> AbstractContextManager[object]:
        """The region of the transformer blocks; embedding, final norm and head stay outside."""
        if self._recipe is None:
            return nullcontext()
        return te.autocast(enabled=True, recipe=self._recipe, amax_reduction_group=self._amax_group)

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """The forward and backward passes of one optimizer step; scales are updated when it ends.

        After an exception nothing is updated.
        """
        if self._recipe is None:
            yield
            return
        with te.autocast(enabled=False):
            # Inside an outer region TE leaves the forward update to the outer one, which, not enabled, makes none;
            # taking the first module's mark leaves its backward pass without one too.
            FP8GlobalStateManager.is_first_fp8_module()
            yield
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)

    @contextmanager
    def evaluation(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Forward passes that leave the scaling state as it was; gradients are off inside."""
        before = {s.name: s.amax_history[0].clone() for chunk in chunks for s in scaling_states(chunk)}
        with torch.no_grad():
            yield
        for chunk in chunks:
            for state in scaling_states(chunk):
                # A module that ran for the first time has seen no training step: its running amax is 0.
                row = state.amax_history[0]
                row.copy_(before[state.name]) if state.name in before else row.zero_()
