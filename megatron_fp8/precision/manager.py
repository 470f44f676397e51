"""Applies number formats at run time: which layer computes in FP8, and when scales are updated.

Scales are updated once per optimizer step, after the optimizer's update, and not at the end of every micro-batch as
Transformer Engine does by itself: the amax of a step is then the maximum over all its micro-batches, however these are
divided over ranks and micro-batches, and scales do not depend on the parallel layout. A skipped step leaves no trace.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

try:
    import transformer_engine.pytorch as te
except RuntimeError as error:
    # TE's own message does not know of the stand-in.
    from megatron_fp8.cpu import reject_missing_stand_in

    reject_missing_stand_in(error)
    raise
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megatron_fp8.precision.delayed_scaling import (
    DelayedScales,
    ScaleUnits,
    ScalingState,
    capture,
    restore,
    scaling_states,
)
from megatron_fp8.precision.policy import PrecisionPolicy
from megatron_fp8.precision.te_recipe import init_fp8_modules, largest_number, require_device_support, te_recipe


class PrecisionManager:
    """Applies a `PrecisionPolicy` on this rank.

    `amax_group` None: amaxes are not reduced. Each of several ranks then has its own scales, saved under the name
    `rank_name`; a process that is alone needs no name.
    """

    def __init__(
        self,
        policy: PrecisionPolicy,
        amax_group: ProcessGroup | None,
        device: torch.device,
        rank_name: str | None = None,
    ) -> None:
        self.policy = policy
        self.device = device
        self.params_dtype: torch.dtype = getattr(torch, policy.params_dtype)
        self._amax_group = amax_group
        self._owner = rank_name if amax_group is None else None
        self._layers: dict[int, nn.Module] = {}
        self._fallen_back: frozenset[int] = frozenset()
        self._recipe: Recipe | None = None
        self._without_fp8 = False
        self._scales = DelayedScales(policy.fp8.interval if policy.fp8 is not None else 1)
        if (fp8 := policy.fp8) is not None:
            require_device_support(fp8)
            compute_scale = self._scales.compute if fp8.interval > 1 else None
            self._recipe = te_recipe(fp8, amax_group is not None, device, compute_scale)
            self._units = ScaleUnits(largest_number(fp8, "input"), largest_number(fp8, "grad_output"), fp8.margin)

    def runs_in_fp8(self, layer: int) -> bool:
        """Whether the GEMMs of the layer with this global number currently run in FP8."""
        fp8 = self.policy.fp8
        return fp8 is not None and layer not in fp8.bf16_layers and layer not in self._fallen_back

    def fall_back(self, layers: Collection[int]) -> None:
        """From the next step on run exactly these layers in BF16, in addition to those of the policy.

        Called between two steps, with the same layers on all ranks of a layer's stage.
        """
        self._fallen_back = frozenset(layers)

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """This rank's layers by global number."""
        return self._layers

    def region(self, layer: int) -> AbstractContextManager[None]:
        """The context in which the layer with this global number runs its forward pass; all else stays outside."""
        if self._recipe is None:
            return nullcontext()
        region: AbstractContextManager[None] = te.autocast(enabled=False)
        if self.runs_in_fp8(layer) and not self._without_fp8:
            region = te.autocast(enabled=True, recipe=self._recipe, amax_reduction_group=self._amax_group)
        return region

    def building(self, layer: int) -> AbstractContextManager[None]:
        """The context in which the layer with this global number is built: its weights live in FP8 if so configured."""
        fp8 = self.policy.fp8
        if fp8 is None or not fp8.param_gather or not self.runs_in_fp8(layer):
            return nullcontext()
        region: AbstractContextManager[None]
        region = te.quantized_model_init(recipe=self._recipe, preserve_high_precision_init_val=True)
        return region

    def attach(self, layers: Mapping[int, nn.Module]) -> None:
        """Register this rank's layers by global number, and make their FP8 state.

        Collective over the amax group if weights live in FP8.
        """
        self._layers = dict(layers)
        fp8 = self.policy.fp8
        if fp8 is None:
            return
        # As in a step, the outer region keeps the inner ones from updating scales when they end.
        with te.autocast(enabled=False):
            for number, layer in self._layers.items():
                if self.runs_in_fp8(number):
                    with self.region(number):
                        init_fp8_modules(layer, fp8)
        if fp8.param_gather:
            # The amaxes of FP8 weights were taken when they were filled. The first optimizer step casts them again,
            # with the scales that weights cast at the start of the second step would use.
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)

    def scaling_states(self) -> Iterator[ScalingState]:
        """Delayed-scaling state of this rank's layers, by the names of the whole model."""
        for number, layer in self._layers.items():
            yield from scaling_states(layer, f"layers.{number}")

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of this rank's scaling state by name; the union over all ranks is the job's."""
        if self._recipe is None:
            return {}
        saved = capture(self.scaling_states(), self._units, self._owner, self.device)
        return {**saved, "num_updates": torch.tensor(self._scales.num_updates, device=self.device)}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> list[str]:
        """Load the state of a job under any layout: the union of its ranks' `state_dict`s.

        Returns notes on what was changed or lost; empty if nothing was.
        """
        if self._recipe is None:
            return ["the saved FP8 scaling state is not used: this run has no FP8"] if saved else []
        if not saved:
            return ["no FP8 scaling state was saved: all scales start from scratch"]
        self._scales.num_updates = int(saved["num_updates"])
        notes = restore(self.scaling_states(), saved, self._units, self._owner)
        for number in self._layers:
            if not self.runs_in_fp8(number) and any(name.startswith(f"layers.{number}.") for name in saved):
                notes.append(f"layers.{number} runs in BF16 here: its scaling state is not used")
        return notes

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """The forward and backward passes of one optimizer step; `finish_step` follows the optimizer's."""
        if self._recipe is None:
            yield
            return
        with te.autocast(enabled=False):
            # Inside an outer region TE leaves the update of the forward scales to the outer one, which makes none
            # because it is not enabled. Consuming the first module's mark suppresses the update of its backward pass.
            FP8GlobalStateManager.is_first_fp8_module()
            yield

    def finish_step(self, skipped: bool = False) -> None:
        """Update the scales from the step's amaxes, or drop these if the optimizer skipped the step.

        Collective over the amax group.
        """
        if self._recipe is None:
            return
        running = [state.amax_history[0] for state in self.scaling_states()]
        self._scales.finish_step(running, skipped)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Forward passes without gradients that leave the scaling state unchanged."""
        fp8, without_fp8 = self.policy.fp8, self._without_fp8
        before = [(state.amax_history[0], state.amax_history[0].clone()) for state in self.scaling_states()]
        self._without_fp8 = fp8 is not None and not fp8.evaluate
        try:
            with torch.no_grad():
                yield
        finally:
            self._without_fp8 = without_fp8
            for running, value in before:
                running.copy_(value)
