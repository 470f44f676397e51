"""Reads the scales of FP8 tensors by name, without a pass over the tensors' data.

- Delayed scaling keeps scales and amax histories, which are read after the step's update.
- Other recipes keep nothing, so a watcher collects the scales from the tensors of one step. The amax is the one that
  the smallest scale stands for: exact under `tensorwise`, up to a factor of 2 too large where scales are powers of 2.

Where ranks scale differently (amax reduction off, tensorwise), the worst counts: smallest scale, largest amax, least
headroom.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from transformer_engine.pytorch.quantized_tensor import Quantizer
from transformer_engine.pytorch.tensor import Float8BlockwiseQTensorStorage, Float8TensorStorage, MXFP8TensorStorage

from megatron_fp8.precision.operands import Operand, by_quantizer, reduced
from megatron_fp8.precision.policy import Fp8Policy
from megatron_fp8.precision.te_recipe import largest_number

_MXFP8_BLOCK, _MXFP8_BIAS = 32, 127


@dataclass(frozen=True)
class OperandScale:
    """`amax`: the newest. `history_max`: the largest in the history of delayed scaling.

    `headroom_bits`: log2(largest FP8 value / (scale * history_max)), the powers of two by which the tensor can grow
    before it clips; negative if it clips. The last two are None without a history.
    """

    scale: float
    amax: float
    history_max: float | None
    headroom_bits: float | None

    def series(self) -> dict[str, float]:
        """Values by the names of their series."""
        values = {"scale": self.scale, "amax": self.amax}
        if self.history_max is not None and self.headroom_bits is not None:
            values |= {"history-max": self.history_max, "head-room-bits": self.headroom_bits}
        return values


def delayed_scales(
    operands: Sequence[Operand], policy: Fp8Policy, group: ProcessGroup | None
) -> dict[str, OperandScale]:
    """Delayed-scaling state of the operands, without those that have no amax yet.

    With a history of one step TE keeps no amax beyond the update; then it is computed from the scale. Collective over
    `group`; one copy to the host.
    """
    rows = {}
    for operand in operands:
        state, slot = operand.module.fp8_meta[operand.direction], operand.slot
        scale, history, limit = state.scale[slot], state.amax_history[:, slot], largest_number(policy, operand.kind)
        if len(history) > 1:
            newest, highest = history[-1], history.max()
        else:
            newest = highest = limit / (scale * 2.0**policy.margin)
        rows[operand.name] = torch.stack([-scale, newest, highest, torch.log2(scale * highest / limit)])
    return {
        name: OperandScale(-scale, newest, highest, -bits)
        for name, (scale, newest, highest, bits) in reduced(rows, ReduceOp.MAX, group).items()
        if highest > 0
    }


class ScaleWatcher:
    """Collects the scales with which `operands` are quantized while it watches a `tap`."""

    def __init__(self, operands: Sequence[Operand], policy: Fp8Policy) -> None:
        self._operands = operands
        self._of_quantizer = by_quantizer(operands)
        self._policy = policy
        # (minus the smallest scale, largest amax) by name.
        self._worst: dict[str, Tensor] = {}

    def quantized(self, quantizer: Quantizer, result: Any, source: Callable[[], Tensor]) -> None:  # noqa: ARG002
        """See `tap.Watcher`."""
        operand = self._of_quantizer.get(id(quantizer))
        if operand is not None and not operand.is_recomputed:
            self._take(operand, result)

    def multiplied(self, a: Any, transpose_a: bool, b: Any, transpose_b: bool) -> None:
        """See `tap.Watcher`."""

    def read(self, group: ProcessGroup | None) -> dict[str, OperandScale]:
        """What was collected, and the scales of weights that live in FP8.

        Collective over `group`; one copy to the host.
        """
        for operand in self._operands:
            if operand.kind == "weight" and operand.weight_name is not None:
                self._take(operand, getattr(operand.module, operand.weight_name))
        worst = reduced(self._worst, ReduceOp.MAX, group).items()
        return {name: OperandScale(-scale, amax, None, None) for name, (scale, amax) in worst if amax > 0}

    def _take(self, operand: Operand, quantized: Any) -> None:
        inverse = _largest_inverse_scale(quantized)
        if inverse is not None:
            row = torch.stack([-inverse.reciprocal(), inverse * largest_number(self._policy, operand.kind)])
            before = self._worst.get(operand.name)
            self._worst[operand.name] = row if before is None else torch.maximum(before, row)


def seed_delayed_scales(operands: Sequence[Operand], amaxes: Mapping[str, float], policy: Fp8Policy) -> None:
    """Initialize the scales and histories of operands that return to FP8 from these amaxes.

    An amax so small that its scale overflows FP32 gets the largest FP32 value as its scale, as in TE's formula.
    """
    largest_scale = torch.finfo(torch.float32).max
    for operand in operands:
        amax = amaxes.get(operand.name, 0.0)
        if not 0 < amax < float("inf"):
            continue
        state = operand.module.fp8_meta[operand.direction]
        scale = largest_number(policy, operand.kind) / amax / 2.0**policy.margin
        state.scale[operand.slot] = min(scale, largest_scale)
        if len(state.amax_history) > 1:
            state.amax_history[-1, operand.slot] = amax


def _largest_inverse_scale(result: Any) -> Tensor | None:
    """FP32 scalar: the inverse of the smallest scale in a quantized tensor, without blocks of zeros.

    0 if there are only such blocks; None if the scales cannot be read.
    """
    if isinstance(result, Float8TensorStorage):
        scale_inv: Tensor = result._scale_inv
        return scale_inv.reshape(())
    if isinstance(result, Float8BlockwiseQTensorStorage):
        rowwise = result._rowwise_scale_inv
        inverse = rowwise if rowwise is not None else result._columnwise_scale_inv
        # A block of zeros has scale 1.
        return torch.where(inverse == 1, 0, inverse).max()
    if isinstance(result, MXFP8TensorStorage) and not result._with_gemm_swizzled_scales:
        if result._rowwise_data is None:
            return None
        width = result._rowwise_data.shape[-1]
        # Padding of the scales is undefined.
        scales = result._rowwise_scale_inv[: result._rowwise_data.numel() // width, : -(-width // _MXFP8_BLOCK)]
        return torch.exp2(scales.max().float() - _MXFP8_BIAS)
    return None
