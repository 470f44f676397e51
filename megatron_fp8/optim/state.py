"""Accesses the optimizer's state by model parameter: master weights, moments, step, loss scale.

Whatever optimizer Megatron made (distributed or not, with FP32 parameters, with TE's scaled low-precision states),
a rank's state is a list of parts: flat FP32 values of a range of one parameter. Must not know files or layouts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor, nn
from transformer_engine.pytorch import Float8Tensor
from transformer_engine.pytorch.optimizers import FusedAdam

MASTER, EXP_AVG, EXP_AVG_SQ, WEIGHT = "master", "exp_avg", "exp_avg_sq", "weight"
NAMES = (MASTER, EXP_AVG, EXP_AVG_SQ)


@dataclass(frozen=True)
class StatePart:
    """This rank's optimizer state of the elements `start` to `stop` of a parameter's flat shard.

    `adam` keeps the moments under `main`, the master (or what stands for it: the parameter itself in FP32).
    """

    parameter: nn.Parameter
    start: int
    stop: int
    adam: FusedAdam
    main: Tensor

    @property
    def names(self) -> tuple[str, ...]:
        """What must be kept to go on exactly.

        Usually masters and moments. TE makes a weight from the new master before it rounds that to FP16, so that
        such a master does not say what the weight is.
        """
        rounded = self.adam.master_weights and self.adam.master_weight_dtype != torch.float32
        return (*NAMES, WEIGHT) if rounded else NAMES

    def read(self, name: str) -> Tensor:
        """Flat FP32 values of `master`, `exp_avg` or `exp_avg_sq`, or the `weight` in its own dtype.

        Where it is kept so, the very tensor.
        """
        if name == WEIGHT:
            return self.main.detach().view(-1)
        if name == MASTER and not self.adam.master_weights:
            return self.main.detach().view(-1)
        state: Tensor = self.adam.get_unscaled_state(self.main, _te_name(name))
        return state.detach().view(-1)

    def write(self, name: str, values: Tensor, scale: Tensor | None = None) -> None:
        """Put back what `read` gave, changed; scaled states get a new scale, or `scale`, that of the values' origin.

        A new scale differs from the old one in the last bit at times, so an exact copy needs the old one.
        """
        if self._is_kept_in(values, name):
            return
        values = values.view(self.main.shape)
        # TE changes the values in place where it scales them.
        self.adam.set_scaled_state(self.main, _te_name(name), values.clone() if scale is not None else values)
        mine = self.scale(name)
        if scale is None or mine is None:
            return
        mine.copy_(scale.view(mine.shape))
        state = self.adam.state[self.main][_te_name(name)]
        state.copy_(values if isinstance(state, Float8Tensor) else values / scale)

    def _is_kept_in(self, values: Tensor, name: str) -> bool:
        """Whether `values` are the very tensor, not a copy in FP32; asked without making one."""
        is_main = name == WEIGHT or (name == MASTER and not self.adam.master_weights)
        kept = self.main if is_main else self.adam.state[self.main][_te_name(name)]
        return not isinstance(kept, Float8Tensor) and kept.data_ptr() == values.data_ptr()

    def scale(self, name: str) -> Tensor | None:
        """The scale of a state in FP16 or FP8, FP32 `[1]`; the very tensor. None for states that have none."""
        state = self.adam.state[self.main].get(_te_name(name))
        scale: Tensor | None = None
        if isinstance(state, Float8Tensor):
            scale = state._quantizer.scale
        elif state is not None and state.dtype == torch.float16:
            scale = self.adam._scales[self.main][_te_name(name)]
        return scale


def state_parts(optimizer: MegatronOptimizer) -> Iterator[StatePart]:
    """Every part that this rank keeps, in the optimizer's order; `allocate_state` first where no step was made."""
    for inner in inner_optimizers(optimizer):
        for parameter, start, stop, main in _ranges(inner):
            if stop > start:
                yield StatePart(parameter, start, stop, inner.optimizer, main)


def allocate_state(optimizer: MegatronOptimizer) -> None:
    """Make the moments (zeros) and masters that TE makes in the first step."""
    for inner in inner_optimizers(optimizer):
        adam = inner.optimizer
        for group in adam.param_groups:
            group.setdefault("step", 0)
        for _, start, stop, main in _ranges(inner):
            if stop > start and main not in adam.state:
                adam.initialize_state(main, adam.store_param_remainders)
                if adam.master_weights:
                    adam.set_scaled_state(main, "master_param", main.detach().float())


def read_scalars(optimizer: MegatronOptimizer) -> dict[str, float]:
    """Numbers beside the tensors: Adam's step, and a dynamic loss scale with its trackers."""
    scalars: dict[str, float] = {"step": 0}
    for inner in inner_optimizers(optimizer):
        scalars["step"] = max([scalars["step"], *(group.get("step", 0) for group in inner.optimizer.param_groups)])
        scaler = getattr(inner, "grad_scaler", None)
        if isinstance(scaler, DynamicGradScaler):
            state = scaler.state_dict()
            scalars["loss_scale"] = float(state["scale"])
            scalars["growth_tracker"] = state["growth_tracker"]
            scalars["hysteresis_tracker"] = state["hysteresis_tracker"]
    return scalars


def write_scalars(optimizer: MegatronOptimizer, scalars: Mapping[str, float]) -> None:
    """Put back what `read_scalars` gave; a loss scale that was not saved starts as configured."""
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            group["step"] = int(scalars["step"])
        scaler = getattr(inner, "grad_scaler", None)
        if isinstance(scaler, DynamicGradScaler) and "loss_scale" in scalars:
            scaler.load_state_dict(
                {
                    "scale": torch.full_like(scaler.scale, scalars["loss_scale"]),
                    "growth_tracker": int(scalars["growth_tracker"]),
                    "hysteresis_tracker": int(scalars["hysteresis_tracker"]),
                }
            )


@torch.no_grad()
def masters_to_parameters(
    optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel], has_weights: bool = False
) -> None:
    """Set the model's parameters from the masters, as every step does; collective over the data-parallel group.

    `has_weights`: this rank's parts have their `weight` already, it needs but to be gathered.
    """
    for part in state_parts(optimizer):
        if part.adam.master_weights and not has_weights:
            # Megatron leaves this to TE's optimizer, which does it in a step only.
            part.main.copy_(part.read(MASTER).view(part.main.shape))
    for inner in inner_optimizers(optimizer):
        if not isinstance(inner, FP32Optimizer):
            inner._copy_main_params_to_model_params()
        if isinstance(inner, DistributedOptimizer):
            for chunk in chunks:
                chunk.start_param_sync(force_sync=True)


def inner_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Megatron's optimizers behind the one that it hands out, those without parameters left out."""
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in every if not inner.is_stub_optimizer]


def _te_name(name: str) -> str:
    return "master_param" if name == MASTER else name


def _ranges(inner: MegatronOptimizer) -> Iterator[tuple[nn.Parameter, int, int, Tensor]]:
    """(parameter, first and one past the last flat element kept here, the tensor that Adam knows it by)."""
    if isinstance(inner, DistributedOptimizer):
        for parameter, (group, order) in inner.model_param_group_index_map.items():
            kept = inner._get_model_param_range_map(parameter)["param"]
            yield parameter, kept.start, kept.end, inner.optimizer.param_groups[group]["params"][order]
    elif isinstance(inner, Float16OptimizerWithFloat16Params):
        for models, mains in zip(inner.float16_groups, inner.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(models, mains, strict=True):
                yield parameter, 0, parameter.numel(), main
        for parameters in inner.fp32_from_fp32_groups:
            for parameter in parameters:
                yield parameter, 0, parameter.numel(), parameter
    elif isinstance(inner, FP32Optimizer):
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, 0, parameter.numel(), parameter
    else:
        raise NotImplementedError(f"the state of {type(inner).__name__} is not known")
