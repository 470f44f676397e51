"""Owns the measurement of FP8 tensors from their data: what was clipped, flushed to zero and how large the error is.

For layers in FP8 it compares each quantized tensor with what it was made of. For layers in BF16 it asks what FP8 would
do ("shadow"): it quantizes the operands of their GEMMs on the side, with quantizers that it is given. Either way the
computation itself is left as it is. Must not know limits, steps or ranks beyond the group that it sums over.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformer_engine_torch as tex
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, Quantizer
from transformer_engine.pytorch.tensor import (
    Float8BlockwiseQTensorStorage,
    Float8TensorStorage,
    MXFP8TensorStorage,
)

from megatron_fp8.precision.operands import Kind, Operand, by_quantizer, operands
from megatron_fp8.precision.quantization_sums import quantization_sums
from megatron_fp8.precision.tap import tap
from megatron_fp8.precision.tensor_health import TensorHealth

# Bits of the largest finite number, without the sign.
_LARGEST = {DType.kFloat8E4M3: 0x7E, DType.kFloat8E5M2: 0x7B}


class TensorProbe:
    """Measures the tensors of `layers` (by global number) that are quantized while `measuring`.

    `shadow` makes the quantizer with which an operand of the `bf16_layers` among them is tried; None: those are not
    measured. (An FP8 layer has BF16 operands too where its GEMMs are overridden; these are not tried.) With
    recomputation the second forward pass is not counted again. Sums stay on the device until `read`.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        shadow: Callable[[Kind], Quantizer] | None = None,
        bf16_layers: Collection[int] = (),
    ) -> None:
        self._operands = list(operands(layers))
        self._shadow = shadow
        self._bf16_layers = bf16_layers
        self._sums: dict[str, Tensor] = {}
        self._shadow_amax: dict[str, Tensor] = {}
        self._trying = False
        self._of_quantizer: dict[int, Operand] = {}
        self._of_weight: dict[int, dict[Kind, Operand]] = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure what runs inside."""
        self._find_quantizers()
        if self._shadow is not None:
            for operand in self._operands:
                if operand.layer in self._bf16_layers and operand.weight_name is not None:
                    weight = getattr(operand.module, operand.weight_name)
                    self._of_weight.setdefault(weight.data_ptr(), {})[operand.kind] = operand
        with tap(self):
            yield

    def read(self, group: ProcessGroup | None = None) -> dict[str, TensorHealth]:
        """What was measured, by tensor, summed over the ranks of `group`, on which the same tensors ran.

        Collective over `group`; one copy to the host.
        """
        names = sorted(self._sums)
        if not names:
            return {}
        sums = torch.stack([self._sums[name] for name in names])
        if group is not None and group.size() > 1:
            torch.distributed.all_reduce(sums, group=group)
        return {name: TensorHealth.from_sums(row) for name, row in zip(names, sums.tolist(), strict=True)}

    def read_shadow_amaxes(self, group: ProcessGroup | None = None) -> dict[str, float]:
        """Largest magnitude of each BF16 tensor that was tried, over the ranks of `group`; collective like `read`."""
        names = sorted(self._shadow_amax)
        if not names:
            return {}
        amaxes = torch.stack([self._shadow_amax[name] for name in names])
        if group is not None and group.size() > 1:
            torch.distributed.all_reduce(amaxes, op=torch.distributed.ReduceOp.MAX, group=group)
        return dict(zip(names, amaxes.tolist(), strict=True))

    def quantized(self, quantizer: Quantizer, result: Any, source: Callable[[], Tensor]) -> None:
        """See `tap.Watcher`."""
        if self._trying:
            return
        operand = self._of_quantizer.get(id(quantizer))
        if operand is None:
            # TE makes quantizers anew when a layer returns to FP8.
            self._find_quantizers()
            operand = self._of_quantizer.get(id(quantizer))
        if operand is not None and not operand.is_recomputed:
            self._add(operand, source(), result, quantizer)

    def multiplied(self, a: Any, transpose_a: bool, b: Any, transpose_b: bool) -> None:
        """See `tap.Watcher`: forward (TN) `a` is the weight and `b` the input, for input gradients (NN) `b` is the
        output gradient."""
        if self._shadow is None or transpose_b or isinstance(a, QuantizedTensorStorage):
            return
        found = self._of_weight.get(a.data_ptr())
        if found is None or isinstance(b, QuantizedTensorStorage):
            return
        if not transpose_a:
            self._try(found["grad_output"], b)
            return
        self._try(found["input"], b)
        if found["weight"].name not in self._sums:
            self._try(found["weight"], a)

    def _try(self, operand: Operand, tensor: Tensor) -> None:
        if operand.is_recomputed:
            return
        assert self._shadow is not None
        quantizer = self._shadow(operand.kind)
        quantizer.set_usage(rowwise=True, columnwise=False)
        self._trying = True
        result = quantizer.quantize(tensor.detach())
        self._trying = False
        self._add(operand, tensor, result, quantizer)
        amax = tensor.detach().abs().amax().float()
        before = self._shadow_amax.get(operand.name)
        self._shadow_amax[operand.name] = amax if before is None else torch.maximum(before, amax)

    def _find_quantizers(self) -> None:
        self._of_quantizer = by_quantizer(self._operands)

    def _add(self, operand: Operand, source: Tensor, result: Any, quantizer: Quantizer) -> None:
        if getattr(result, "_with_gemm_swizzled_scales", False):
            # Nothing but the GEMM reads swizzled scales.
            plain = quantizer.copy()
            plain.optimize_for_gemm = False
            self._trying = True
            result = plain.quantize(source.detach())
            self._trying = False
        at_limit = (_bytes(result).reshape(-1) & 0x7F) == _LARGEST[DType.cast(result._fp8_dtype)]
        sums = quantization_sums(source.detach().float().reshape(-1), _numbers(result).reshape(-1), at_limit)
        before = self._sums.get(operand.name)
        self._sums[operand.name] = sums if before is None else before.add_(sums)


def _numbers(result: Any) -> Tensor:
    """FP32 numbers of a quantized tensor."""
    if isinstance(result, MXFP8TensorStorage):
        # TE's method would first move what is not a GPU's to one.
        return tex.dequantize(result, DType.kFloat32)
    return result.dequantize(dtype=torch.float32)


def _bytes(result: Any) -> Tensor:
    """The FP8 bytes in the tensor's own order, of the usage that `dequantize` reads."""
    if isinstance(result, Float8TensorStorage):
        return result._data if result._data is not None else result._transpose.movedim(0, -1)
    if isinstance(result, Float8BlockwiseQTensorStorage):
        return result._rowwise_data if result._rowwise_data is not None else result._columnwise_data.movedim(0, -1)
    if isinstance(result, MXFP8TensorStorage):
        return result._rowwise_data if result._rowwise_data is not None else result._columnwise_data
    raise TypeError(f"{type(result).__name__} is none of the FP8 formats that can be measured")
