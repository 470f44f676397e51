"""Owns looking at what Transformer Engine's kernels are given and give back, without changing it.

TE quantizes, normalizes, activates and multiplies through the functions of its compiled extension, which its modules
look up by name at every call. While a tap is open, the functions that quantize, and the GEMM, are wrapped: the real
one runs as ever, then the watcher sees its arguments and results. Must not know what is measured.
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
# Where the quantized tensor is in a result that is a list.
_PLACE = {"bgrad_quantize": 1, "layernorm_fwd": 0, "rmsnorm_fwd": 0, **{f"dbias_d{name}": 1 for name in _ACTIVATIONS}}


class Watcher(Protocol):
    """What sees the calls."""

    def quantized(self, quantizer: Quantizer, result: Any, source: Callable[[], Tensor]) -> None:
        """`quantizer` made `result` of the tensor that `source` computes (again, where a kernel does both)."""

    def multiplied(self, a: Any, transpose_a: bool, b: Any, transpose_b: bool) -> None:
        """A GEMM read `a` and `b`; see `generic_gemm`."""


@contextmanager
def tap(watcher: Watcher) -> Iterator[None]:
    """Show `watcher` every quantization and every GEMM inside; the extension is as before when it is left."""
    names = (*_CASTS, *_NORMS, *_ACTIVATIONS, *_GRADIENTS)
    # The stand-in answers to every name; only what is really there is wrapped.
    watched = {name: _watch_quantization(watcher, name, vars(tex)[name]) for name in names if name in vars(tex)}
    watched["generic_gemm"] = _watch_gemm(watcher, tex.generic_gemm)
    # TE's modules call the extension through either of the two.
    places = [(module, name) for module in (tex, cpp_extensions) for name in watched if name in vars(module)]
    real = [vars(module)[name] for module, name in places]
    try:
        for module, name in places:
            setattr(module, name, watched[name])
        yield
    finally:
        for (module, name), function in zip(places, real, strict=True):
            setattr(module, name, function)


def _watch_quantization(watcher: Watcher, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    place = _PLACE.get(name)

    def without(value: Any) -> Any:
        return None if isinstance(value, Quantizer) else value

    def watched(*values: Any, **keywords: Any) -> Any:
        result = real(*values, **keywords)
        quantizer = next((value for value in (*values, *keywords.values()) if isinstance(value, Quantizer)), None)
        if quantizer is not None:

            def source() -> Tensor:
                if name in _CASTS:
                    return values[0] if values else next(iter(keywords.values()))
                plain = real(*map(without, values), **{key: without(value) for key, value in keywords.items()})
                return plain if place is None else plain[place]

            with torch.no_grad():
                watcher.quantized(quantizer, result if place is None else result[place], source)
        return result

    return watched


def _watch_gemm(watcher: Watcher, real: Callable[..., Any]) -> Callable[..., Any]:
    def watched(a: Any, transpose_a: bool, b: Any, transpose_b: bool, *values: Any, **keywords: Any) -> Any:
        with torch.no_grad():
            watcher.multiplied(a, transpose_a, b, transpose_b)
        return real(a, transpose_a, b, transpose_b, *values, **keywords)

    return watched
