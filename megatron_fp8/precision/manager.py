"""Owns number formats at run time: which layer computes in FP8, and when scales are updated.

Scales are updated once per optimizer step, after the optimizer has stepped, and not (as Transformer Engine does by
itself) at the end of every micro-batch: the amax of a step is then the maximum over all its micro-batches, however
they are divided over ranks, and the parallel layout does not change the scales. A step that was skipped leaves no
trace in them. Must not know models, configs or how ranks were started.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from megatron_fp8.precision.device_support import require_device_support
from megatron_fp8.precision.policy import PrecisionPolicy
from megatron_fp8.precision.scaling import DelayedScales
from megatron_fp8.precision.state import ScaleUnits, ScalingState, capture, restore, scaling_states
from megatron_fp8.precision.te_modules import init_fp8_modules
from megatron_fp8.precision.te_recipe import largest_number, te_recipe


class PrecisionManager:
    """Applies a `PrecisionPolicy` on this rank.

    `amax_group` None: amaxes are not reduced, every rank has scales of its own, saved under the name `rank_name`.
    """

    def __init__(
        self, policy: PrecisionPolicy, amax_group: ProcessGroup | None, device: torch.device, rank_name: str = ""
    ) -> None:
        self.policy = policy
        self.device = device
        self.params_dtype: torch.dtype = getattr(torch, policy.params_dtype)
        self._amax_group = amax_group
        self._owner = rank_name if amax_group is None else None
        self._layers: dict[int, nn.Module] = {}
        self._fallen_back: frozenset[int] = frozenset()
        self._recipe = None
        self._without_fp8 = False
        self._scales = DelayedScales(policy.fp8.interval if policy.fp8 is not None else 1)
        if policy.fp8 is not None:
            require_device_support(policy.fp8)
            compute_scale = self._scales.compute if policy.fp8.interval > 1 else None
            self._recipe = te_recipe(policy.fp8, amax_group is not None, device, compute_scale)

    def runs_in_fp8(self, layer: int) -> bool:
        """Whether the GEMMs of the layer with this global number run in FP8 at present."""
        fp8 = self.policy.fp8
        return fp8 is not None and layer not in fp8.bf16_layers and layer not in self._fallen_back

    def fall_back(self, layers: Collection[int]) -> None:
        """From the next step on these layers run in BF16 whatever the policy says, and no others do.

        All ranks of a layer's stage call this with the same layers, between two steps.
        """
        self._fallen_back = frozenset(layers)

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """This rank's layers by global number."""
        return self._layers

    def region(self, layer: int) -> AbstractContextManager[object]:
        """The region in which the layer with this global number runs; everything else stays outside of all."""
        if self._recipe is None:
            return nullcontext()
        if self._without_fp8 or not self.runs_in_fp8(layer):
            return te.autocast(enabled=False)
        return te.autocast(enabled=True, recipe=self._recipe, amax_reduction_group=self._amax_group)

    def building(self, layer: int) -> AbstractContextManager[object]:
        """The region in which the layer with this global number is made: its weights live in FP8 if so configured."""
        fp8 = self.policy.fp8
        if fp8 is None or not fp8.param_gather or not self.runs_in_fp8(layer):
            return nullcontext()
        return te.quantized_model_init(recipe=self._recipe, preserve_high_precision_init_val=True)

    def attach(self, layers: Mapping[int, nn.Module]) -> None:
        """Take charge of this rank's layers, by global number; their FP8 state exists from here on.

        Collective over the amax group where weights live in FP8.
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
            # FP8 weights entered their amaxes when they were filled. The first optimizer step casts them anew, and
            # shall find the scales that weights cast at the start of the second step would find.
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)

    def scaling_states(self) -> Iterator[ScalingState]:
        """Delayed-scaling state of this rank's layers, by the whole model's names."""
        for number, layer in self._layers.items():
            yield from scaling_states(layer, f"layers.{number}.")

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's scaling state as copies by name; the union over all ranks is the job's."""
        if self._recipe is None:
            return {}
        saved = capture(self.scaling_states(), self._units, self._owner, self.device)
        return {**saved, "num_updates": torch.tensor(self._scales.num_updates, device=self.device)}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> list[str]:
        """Take over the state of a job in any layout, the union of its ranks' `state_dict`s.

        Returns what could not be carried over as it was, in words; empty: everything.
        """
        if self._recipe is None:
            return ["the FP8 scaling state is not used: this run has no FP8"] if saved else []
        if not saved:
            return ["no FP8 scaling state was saved: all scales start anew"]
        self._scales.num_updates = int(saved["num_updates"])
        notes = restore(self.scaling_states(), saved, self._units, self._owner)
        for number in self._layers:
            if not self.runs_in_fp8(number) and any(name.startswith(f"layers.{number}.") for name in saved):
                notes.append(f"layers.{number} runs in BF16 here: its scaling state is not used")
        return notes

    @property
    def _units(self) -> ScaleUnits:
        fp8 = self.policy.fp8
        assert fp8 is not None
        return ScaleUnits(largest_number(fp8, "input"), largest_number(fp8, "grad_output"), fp8.margin)

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """The forward and backward passes of one optimizer step; `finish_step` comes after the optimizer's."""
        if self._recipe is None:
            yield
            return
        with te.autocast(enabled=False):
            # Inside an outer region TE leaves the forward update to the outer one, which, not enabled, makes none;
            # taking the first module's mark leaves its backward pass without one too.
            FP8GlobalStateManager.is_first_fp8_module()
            yield

    def finish_step(self, skipped: bool) -> None:
        """Update the scales from the step's amaxes, or forget these when the optimizer skipped the step.

        Collective over the amax group.
        """
        if self._recipe is None:
            return
        running = [state.amax_history[0] for state in self.scaling_states()]
        self._scales.finish_step(running, skipped)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Forward passes that leave the scaling state as it was; gradients are off inside."""
        before = [(state, state.amax_history[0].clone()) for state in self.scaling_states()]
        fp8 = self.policy.fp8
        self._without_fp8 = fp8 is not None and not fp8.evaluate
        try:
            with torch.no_grad():
                yield
        finally:
            self._without_fp8 = False
            for state, running in before:
                state.amax_history[0].copy_(running)
