"""Measures FP8 tensors from their data: clipped and flushed shares, quantization error.

In FP8 layers each quantized tensor is compared with its source. In BF16 layers the operands of the GEMMs are quantized
on the side ("shadow") to see what FP8 would do to them. Neither changes the computation.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformer_engine_torch as tex
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, Quantizer
from transformer_engine.pytorch.tensor import Float8BlockwiseQTensorStorage, Float8TensorStorage, MXFP8TensorStorage

from megatron_fp8.precision.operands import Kind, Operand, by_quantizer, operands, reduced
from megatron_fp8.precision.tap import tap
from megatron_fp8.precision.tensor_health import TensorHealth, quantization_sums

# Bits of the largest finite value, without the sign.
_LARGEST = {DType.kFloat8E4M3: 0x7E, DType.kFloat8E5M2: 0x7B}


class TensorProbe:
    """Measures the tensors of `layers` (by global number) that are quantized inside `measuring`.

    `shadow`: makes a quantizer for an operand of the `bf16_layers` among them; None: those are not measured. (BF16
    operands of FP8 layers, whose GEMMs are overridden, are not measured either.) Activation recomputation does not
    count a second time. Sums stay on the device until `read`.
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
        self._on_the_side = False
        self._of_quantizer: dict[int, Operand] = {}
        self._of_weight: dict[int, dict[Kind, Operand]] = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the steps inside."""
        self._find_quantizers()
        if self._shadow is not None:
            for operand in self._operands:
                if operand.layer in self._bf16_layers and operand.weight_name is not None:
                    weight = getattr(operand.module, operand.weight_name)
                    self._of_weight.setdefault(weight.data_ptr(), {})[operand.kind] = operand
        with tap(self):
            yield

    def read(self, group: ProcessGroup | None = None) -> dict[str, TensorHealth]:
        """Results by tensor over the ranks of `group`, which ran the same tensors.

        Collective over `group`; one copy to the host.
        """
        sums = reduced(self._sums, ReduceOp.SUM, group)
        return {name: TensorHealth.from_sums(row) for name, row in sums.items()}

    def read_shadow_amaxes(self, group: ProcessGroup | None = None) -> dict[str, float]:
        """Amax of each shadow-quantized BF16 tensor over the ranks of `group`; collective like `read`."""
        return reduced(self._shadow_amax, ReduceOp.MAX, group)

    def quantized(self, quantizer: Quantizer, result: Any, source: Callable[[], Tensor]) -> None:
        """See `tap.Watcher`."""
        if self._on_the_side:
            return
        operand = self._of_quantizer.get(id(quantizer))
        if operand is None:
            # TE makes new quantizers when a layer returns to FP8.
            self._find_quantizers()
            operand = self._of_quantizer.get(id(quantizer))
        if operand is not None and not operand.is_recomputed:
            self._add(operand, source(), result, quantizer)

    def multiplied(self, a: Any, transpose_a: bool, b: Any, transpose_b: bool) -> None:
        """See `tap.Watcher`. fprop (TN): `a` is the weight, `b` the input; dgrad (NN): `b` is the output gradient."""
        if self._shadow is None or transpose_b or isinstance(a, QuantizedTensorStorage):
            return
        found = self._of_weight.get(a.data_ptr())
        if found is None or isinstance(b, QuantizedTensorStorage):
            return
        if not transpose_a:
            self._add_shadow(found["grad_output"], b)
            return
        self._add_shadow(found["input"], b)
        if found["weight"].name not in self._sums:
            self._add_shadow(found["weight"], a)

    def _add_shadow(self, operand: Operand, tensor: Tensor) -> None:
        if operand.is_recomputed:
            return
        assert self._shadow is not None
        quantizer = self._shadow(operand.kind)
        quantizer.set_usage(rowwise=True, columnwise=False)
        self._add(operand, tensor, self._quantize(quantizer, tensor), quantizer)
        amax = tensor.detach().abs().amax().float()
        before = self._shadow_amax.get(operand.name)
        self._shadow_amax[operand.name] = amax if before is None else torch.maximum(before, amax)

    def _quantize(self, quantizer: Quantizer, tensor: Tensor) -> Any:
        """Quantize without the tap's counting it."""
        self._on_the_side = True
        try:
            return quantizer.quantize(tensor.detach())
        finally:
            self._on_the_side = False

    def _find_quantizers(self) -> None:
        self._of_quantizer = by_quantizer(self._operands)

    def _add(self, operand: Operand, source: Tensor, result: Any, quantizer: Quantizer) -> None:
        if getattr(result, "_with_gemm_swizzled_scales", False):
            # Only the GEMM reads swizzled scales.
            plain = quantizer.copy()
            plain.optimize_for_gemm = False
            result = self._quantize(plain, source)
        at_limit = (_bytes(result).reshape(-1) & 0x7F) == _LARGEST[DType.cast(result._fp8_dtype)]
        sums = quantization_sums(source.detach().float().reshape(-1), _numbers(result).reshape(-1), at_limit)
        before = self._sums.get(operand.name)
        self._sums[operand.name] = sums if before is None else before.add_(sums)


def _numbers(result: Any) -> Tensor:
    """FP32 values of a quantized tensor."""
    # TE's method of MXFP8 tensors would first move CPU tensors to a GPU.
    is_mxfp8 = isinstance(result, MXFP8TensorStorage)
    values: Tensor = tex.dequantize(result, DType.kFloat32) if is_mxfp8 else result.dequantize(dtype=torch.float32)
    return values


def _bytes(result: Any) -> Tensor:
    """The FP8 bytes in the order of the tensor's elements, of the usage that `dequantize` reads."""
    rowwise: Tensor | None
    columnwise: Tensor | None
    if isinstance(result, Float8TensorStorage):
        rowwise, columnwise = result._data, result._transpose
    elif isinstance(result, (Float8BlockwiseQTensorStorage, MXFP8TensorStorage)):
        rowwise, columnwise = result._rowwise_data, result._columnwise_data
    else:
        raise TypeError(f"{type(result).__name__} is not an FP8 format that can be measured")
    if rowwise is not None:
        return rowwise
    assert columnwise is not None
    # MXFP8 alone stores its columnwise data untransposed.
    return columnwise if isinstance(result, MXFP8TensorStorage) else columnwise.movedim(0, -1)
