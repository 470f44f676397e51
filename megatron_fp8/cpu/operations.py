"""Operations on host tensors: mixing host and GPU tensors fails as under CUDA, and results stay on the host.

Torch calls `HostTensor.__torch_function__` for each operation with a host tensor, and nothing for operations among GPU
tensors, which therefore cost nothing extra. That holds in every thread and in autograd's backward. Sources: ATen's
TensorIterator (a 0-dim host tensor is a scalar to an element-wise operation on the GPU), its index kernels (indices may
be on the host), and the functions that copy between devices or read only shapes. All other mixtures are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_fp8.cpu import generators, streams, transfers
from megatron_fp8.cpu.placement import HostTensor, is_on_host, put_on_host, real_device, tensors_in

# Element-wise operations, without the underscores of `add_`, `__radd__` and the like.
_ELEMENT_WISE = frozenset(
    "add radd iadd sub subtract rsub isub mul multiply rmul imul div divide truediv true_divide rtruediv itruediv rdiv "
    "floordiv floor_divide rfloordiv ifloordiv mod remainder rmod imod fmod pow rpow ipow float_power "
    "eq ne lt le gt ge not_equal less less_equal greater greater_equal "
    "and or xor iand ior ixor rand ror rxor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift "
    "lshift rshift ilshift irshift logical_and logical_or logical_xor "
    "maximum minimum fmax fmin max min atan2 arctan2 hypot copysign nextafter ldexp logaddexp logaddexp2 xlogy "
    "heaviside gcd lcm clamp clip clamp_min clamp_max where lerp addcmul addcdiv fill masked_fill index_fill".split()
)
# Only their last arguments may be host scalars: masks, conditions and indices must be on the device of the values.
_FILLING = {"masked_fill": 2, "index_fill": 3, "where": 1}
# Views of their first argument that read only the shape of the other.
_VIEWS = frozenset({"view_as", "expand_as", "reshape_as"})
# Take a list of GPU tensors and one host scalar.
_BY_NUMBER = frozenset({"_foreach_mul", "_foreach_div"})
# Read only shapes and dtypes, or copy.
_TAKE_ANY = _VIEWS.union(
    "is_same_size result_type can_cast promote_types "
    "_has_compatible_shallow_copy_type copy _foreach_copy tensor_split _foreach_addcmul _foreach_addcdiv".split()
)
_TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
_INDEXING = frozenset({"getitem", "index", "setitem", "index_put"})


def operation_name(function: Callable[..., Any]) -> str:
    """Torch's name without the overload, such as `add_`, `__iadd__` or `add`."""
    return str(getattr(function, "__name__", function)).partition(".")[0]


def _plain(name: str) -> str:
    return name.strip("_") if name.startswith("__") else name.removesuffix("_")


def _writes_first(name: str) -> bool:
    return name.startswith("__i") if name.startswith("__") else name.endswith("_")


def stays(name: str) -> bool:
    """Whether the result of operation `name` is on its first argument's device, whatever the others'."""
    return name in _VIEWS or _plain(name) == "getitem"


def written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that operation `name` writes to; None if it creates one."""
    if _writes_first(name) or _plain(name) == "setitem":
        return args[0] if args else None
    return kwargs.get("out")


def refusal(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], host: Sequence[torch.Tensor], gpu: Sequence[torch.Tensor]
) -> str | None:
    """CUDA's error message for operation `name` on the tensors `host` and `gpu` among its arguments, if it refuses."""
    plain = _plain(name)
    if plain in _TAKE_ANY:
        return None
    if plain in _INDEXING and args:
        return _refused_index(args, host)
    two_devices = f"{_TWO_DEVICES} (in {name})"
    if plain in _BY_NUMBER and len(host) == 1 and host[0].dim() == 0 and len(args) > 1 and args[1] is host[0]:
        return None
    if plain not in _ELEMENT_WISE or any(tensor.dim() for tensor in host):
        return two_devices
    numbers = args[_FILLING.get(plain, 0) :]
    result = written(name, args, kwargs)
    for tensor in host:
        if tensor is result or not any(tensor is each for each in (*numbers, *kwargs.values())):
            return two_devices
    return None if gpu else two_devices


def _is_integer(index: torch.Tensor) -> bool:
    masks = (torch.bool, torch.uint8)
    return not (index.dim() or index.dtype in masks or index.is_floating_point() or index.is_complex())


def _refused_index(args: Sequence[Any], host: Sequence[torch.Tensor]) -> str | None:
    """`x[indices]`, `x[indices] = value`: the indices may be on the host, the value a host scalar."""
    indexed, indices = args[0], args[1] if len(args) > 1 else ()
    listed = indices if isinstance(indices, (tuple, list)) else (indices,)
    # A 0-dim integer is read, like a Python number.
    tensors = [index for index in listed if isinstance(index, torch.Tensor) and not _is_integer(index)]
    on_host = any(indexed is tensor for tensor in host)
    if on_host and not all(any(index is tensor for tensor in host) for index in tensors):
        return "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
    value = args[2] if len(args) > 2 else None
    # Without tensor indices this is a copy into a view.
    if not tensors or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return None
    if any(value is tensor for tensor in host) == on_host:
        return None
    return f"{_TWO_DEVICES} (in index_put_)"


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _backward(
    tensor: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    # Not inside `_operate`, which does not see operations inside an operation.
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _attribute(getter: Callable[..., Any], *args: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        result = getter(*args)
    return put_on_host(result) if type(result) in _PLAIN else result


def _operate(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    given = list(tensors_in((*args, *kwargs.values())))
    name = operation_name(func)
    if transfers.PENDING:
        transfers.refuse_unfinished(name, given, written(name, args, kwargs))
    gpu = [tensor for tensor in given if not is_on_host(tensor) and real_device(tensor).type == "cpu"]
    if gpu:
        host = [tensor for tensor in given if is_on_host(tensor)]
        message = refusal(name, args, kwargs, host, gpu)
        if message is not None:
            raise RuntimeError(message)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs) if gpu else generators.call_on_host(name, func, args, kwargs)
    if name == "copy_" and gpu:
        _note_copy(*args, **kwargs)
    if isinstance(result, (torch.Tensor, list, tuple)) and (not gpu or (stays(name) and is_on_host(given[0]))):
        for tensor in tensors_in((result,)):
            if type(tensor) in _PLAIN and real_device(tensor).type == "cpu" and not any(tensor is each for each in gpu):
                put_on_host(tensor)
    return result


def _note_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
    stream = streams.current_stream()
    host = target if is_on_host(target) else source
    if not non_blocking:
        transfers.finish(transfers.on_stream(stream))
    elif transfers.is_pinned(host):
        transfers.start(host, host is target, stream)


def patch_operations() -> None:
    """Start checking operations on host tensors."""

    def look(
        cls: type,  # noqa: ARG001
        func: Callable[..., Any],
        types: Any,  # noqa: ARG001
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return _attribute(func, *args)
        if func is backward:
            return _backward(*args, **(kwargs or {}))
        return _operate(func, args, kwargs or {})

    backward = torch.Tensor.backward
    HostTensor.__torch_function__ = classmethod(look)  # type: ignore[assignment,method-assign]
