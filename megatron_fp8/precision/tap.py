"""Observes the arguments and results of TE kernel calls, unchanged.

TE's modules look up the functions of its compiled extension by name at every call. While a tap is open, those that
quantize and the GEMM are replaced by wrappers that show the watcher what the real function got and returned. Hooks on
modules would not do: the quantized output of a norm or an activation never leaves TE's modules.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch import cpp_extensions
from transformer_engine.pytorch.quantized_tensor import Quantizer

_ACTIVATIONS = (
    *("gelu", "qgelu", "relu", "srelu", "silu"),
    *("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu", "situglu"),
)
_NORMS = ("layernorm_fwd", "rmsnorm_fwd")
_CASTS = ("quantize", "bgrad_quantize")
_GRADIENTS = (*(f"d{name}" for name in _ACTIVATIONS), "clamped_dswiglu", *(f"dbias_d{name}" for name in _ACTIVATIONS))
# Position of the quantized tensor in results that are lists.
_INDEX = {**dict.fromkeys(_NORMS, 0), "bgrad_quantize": 1, **{f"dbias_d{name}": 1 for name in _ACTIVATIONS}}


class Watcher(Protocol):
    """Sees the calls."""

    def quantized(self, quantizer: Quantizer, result: Any, source: Callable[[], Tensor]) -> None:
        """`quantizer` made `result` from the tensor that `source` returns (recomputed for fused kernels)."""

    def multiplied(self, a: Any, transpose_a: bool, b: Any, transpose_b: bool) -> None:
        """A GEMM read `a` and `b`; see `generic_gemm`."""


@contextmanager
def tap(watcher: Watcher) -> Iterator[None]:
    """Show `watcher` every quantization and every GEMM inside."""
    names = (*_CASTS, *_NORMS, *_ACTIVATIONS, *_GRADIENTS)
    # Not getattr: the stand-in answers to every name.
    watched = {name: _watch_quantization(watcher, name, vars(tex)[name]) for name in names if name in vars(tex)}
    watched["generic_gemm"] = _watch_gemm(watcher, tex.generic_gemm)
    # TE's modules call the extension through either module.
    places = [(module, name) for module in (tex, cpp_extensions) for name in watched if name in vars(module)]
    real = [(module, name, vars(module)[name]) for module, name in places]
    try:
        for module, name, _ in real:
            setattr(module, name, watched[name])
        yield
    finally:
        for module, name, function in real:
            setattr(module, name, function)


def _watch_quantization(watcher: Watcher, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    position = _INDEX.get(name)

    def without(value: Any) -> Any:
        return None if isinstance(value, Quantizer) else value

    def watched(*values: Any, **keywords: Any) -> Any:
        result = real(*values, **keywords)
        quantizer = next((value for value in (*values, *keywords.values()) if isinstance(value, Quantizer)), None)
        if quantizer is not None:

            def source() -> Tensor:
                if name in _CASTS:
                    return _at([*values, *keywords.values()], 0)
                plain = real(*map(without, values), **{key: without(value) for key, value in keywords.items()})
                return _at(plain, position)

            with torch.no_grad():
                watcher.quantized(quantizer, _at(result, position), source)
        return result

    return watched


def _at(result: Any, position: int | None) -> Tensor:
    found: Tensor = result if position is None else result[position]
    return found


def _watch_gemm(watcher: Watcher, real: Callable[..., Any]) -> Callable[..., Any]:
    def watched(a: Any, transpose_a: bool, b: Any, transpose_b: bool, *values: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            watcher.multiplied(a, transpose_a, b, transpose_b)
        return real(a, transpose_a, b, transpose_b, *values, **keywords)

    return watched
