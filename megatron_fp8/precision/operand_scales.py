"""Owns the scales of FP8 tensors by name, as far as they are at hand without a pass over the tensors' data.

- Delayed scaling keeps scales and amax histories: read after the step's update.
- The other recipes keep nothing, so a watcher takes the scales along from the tensors of one step. Their amax is what
  the smallest scale stands for: exact with `tensorwise`, up to a factor of 2 too large where scales are powers of 2.

Ranks that scale differently (amax reduction off, tensorwise) are reported by the worst of them: smallest scale,
largest amax, least head-room. Must not know steps, intervals or where values are written.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformer_engine.pytorch.quantized_tensor import Quantizer
from transformer_engine.pytorch.tensor import (
    Float8BlockwiseQTensorStorage,
    Float8TensorStorage,
    MXFP8TensorStorage,
)

from megatron_fp8.precision.operands import Operand, by_quantizer
from megatron_fp8.precision.policy import Fp8Policy
from megatron_fp8.precision.te_recipe import largest_number

_MXFP8_BLOCK, _MXFP8_BIAS = 32, 127


@dataclass(frozen=True)
class OperandScale:
    """`scale` multiplies the tensor. `amax`: the newest. `history_max`: largest amax that delayed scaling remembers.

    `headroom_bits`: log2(largest FP8 number / (scale * history_max)), powers of two by which the tensor may grow
    before it clips; negative: it would clip. Both are None without a history.
    """

    scale: float
    amax: float
    history_max: float | None
    headroom_bits: float | None

    def series(self) -> dict[str, float]:
        """By the names of their series."""
        values = {"scale": self.scale, "amax": self.amax}
        if self.history_max is not None and self.headroom_bits is not None:
            values |= {"history-max": self.history_max, "head-room-bits": self.headroom_bits}
        return values


def delayed_scales(
    operands: Sequence[Operand], policy: Fp8Policy, group: ProcessGroup | None
) -> dict[str, OperandScale]:
    """Delayed scaling's state of the operands; those of which no amax was seen are left out.

    With a history of one step TE keeps no amax beyond the update: then the one that the scale stands for is given.
    Collective over `group`; one copy to the host.
    """
    rows = []
    for operand in operands:
        state, slot = operand.module.fp8_meta[operand.direction], operand.slot
        scale, history, limit = state.scale[slot], state.amax_history[:, slot], largest_number(policy, operand.kind)
        if len(history) > 1:
            newest, highest = history[-1], history.max()
        else:
            newest = highest = limit / (scale * 2.0**policy.margin)
        rows.append(torch.stack([-scale, newest, highest, torch.log2(scale * highest / limit)]))
    return {
        name: OperandScale(-scale, newest, highest, -bits)
        for name, (scale, newest, highest, bits) in _worst([operand.name for operand in operands], rows, group)
        if highest > 0
    }


class ScaleWatcher:
    """Takes the scales along that the tensors of `operands` are quantized with; see `tap`."""

    def __init__(self, operands: Sequence[Operand], policy: Fp8Policy) -> None:
        self._operands = operands
        self._of_quantizer = by_quantizer(operands)
        self._policy = policy
        self._inverse: dict[str, Tensor] = {}
        self._limits: dict[str, float] = {}

    def quantized(
        self,
        quantizer: Quantizer,
        result: Any,
        source: Callable[[], Tensor],  # noqa: ARG002 - calling it would be a pass over the data
    ) -> None:
        """See `tap.Watcher`."""
        operand = self._of_quantizer.get(id(quantizer))
        if operand is not None and not operand.is_recomputed:
            self._take(operand, result)

    def multiplied(self, a: Any, transpose_a: bool, b: Any, transpose_b: bool) -> None:
        """See `tap.Watcher`."""

    def read(self, group: ProcessGroup | None) -> dict[str, OperandScale]:
        """What was seen, and the scales of weights that are FP8 themselves.

        Collective over `group`, one copy to the host.
        """
        for operand in self._operands:
            if operand.kind == "weight" and operand.weight_name is not None:
                self._take(operand, getattr(operand.module, operand.weight_name))
        names = sorted(self._inverse)
        rows = []
        for name in names:
            inverse = self._inverse[name]
            rows.append(torch.stack([-inverse.reciprocal(), inverse * self._limits[name]]))
        return {
            name: OperandScale(-scale, amax, None, None)
            for name, (scale, amax) in _worst(names, rows, group)
            if amax > 0
        }

    def _take(self, operand: Operand, quantized: Any) -> None:
        inverse = _largest_inverse_scale(quantized)
        if inverse is not None:
            before = self._inverse.get(operand.name)
            self._inverse[operand.name] = inverse if before is None else torch.maximum(before, inverse)
            self._limits[operand.name] = largest_number(self._policy, operand.kind)


def seed_delayed_scales(operands: Sequence[Operand], amaxes: Mapping[str, float], policy: Fp8Policy) -> None:
    """Give operands that return to FP8 the scales of tensors with these amaxes, which also enter the histories.

    An amax so small that its scale overflows FP32 has the largest FP32 number for a scale, as in TE's formula.
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


def _worst(names: Sequence[str], rows: Sequence[Tensor], group: ProcessGroup | None) -> list[tuple[str, list[float]]]:
    """`rows` as lists, their largest values over the ranks of `group`."""
    if not rows:
        return []
    table = torch.stack(list(rows))
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(table, op=torch.distributed.ReduceOp.MAX, group=group)
    return list(zip(names, table.tolist(), strict=True))


def _largest_inverse_scale(result: Any) -> Tensor | None:
    """FP32 scalar: the inverse of the smallest scale in a quantized tensor, blocks of zeros left out.

    0 if there is no other block; None where scales cannot be read.
    """
    if isinstance(result, Float8TensorStorage):
        return result._scale_inv.reshape(())
    if isinstance(result, Float8BlockwiseQTensorStorage):
        rowwise = result._rowwise_scale_inv
        inverse = rowwise if rowwise is not None else result._columnwise_scale_inv
        # A block of zeros has scale 1, whatever the others have.
        return torch.where(inverse == 1, 0, inverse).max()
    if isinstance(result, MXFP8TensorStorage) and not result._with_gemm_swizzled_scales:
        if result._rowwise_data is None:
            return None
        width = result._rowwise_data.shape[-1]
        # The scales are padded with undefined bytes.
        scales = result._rowwise_scale_inv[: result._rowwise_data.numel() // width, : -(-width // _MXFP8_BLOCK)]
        return torch.exp2(scales.max().float() - _MXFP8_BIAS)
    return None
