"""Owns which operations CUDA lets take tensors of the host and of the GPU together.

Sources: ATen's TensorIterator (a 0-dim host tensor is a number to an element-wise operation on the GPU), its index
kernels (indices may be the host's), and the functions that copy between devices or read only a shape. What is not
named here is refused. Must not know how tensors are told apart (`placement`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

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
# Only what is last among their arguments may be a number: masks, conditions and indices lie where the values do.
_FILLING = {"masked_fill": 2, "index_fill": 3, "where": 1}
# Views of their first argument, of whose others they read only the shape.
_VIEWS = frozenset({"view_as", "expand_as", "reshape_as"})
# A list of tensors of the GPU and one number, which is read.
_BY_NUMBER = frozenset({"_foreach_mul", "_foreach_div"})
# Read only shapes and dtypes, or copy.
_TAKE_ANY = _VIEWS.union(
    "is_same_size result_type can_cast promote_types "
    "_has_compatible_shallow_copy_type copy _foreach_copy tensor_split _foreach_addcmul _foreach_addcdiv".split()
)
_TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
_INDEXING = frozenset({"getitem", "index", "setitem", "index_put"})


def operation_name(function: Callable[..., Any]) -> str:
    """`add_`, `__iadd__` or `add`: torch's own name without the overload's."""
    return str(getattr(function, "__name__", function)).partition(".")[0]


def _plain(name: str) -> str:
    return name.strip("_") if name.startswith("__") else name.removesuffix("_")


def _writes_first(name: str) -> bool:
    return name.startswith("__i") if name.startswith("__") else name.endswith("_")


def stays(name: str) -> bool:
    """Whether the result of the operation `name` is where its first argument is, whatever the others are."""
    return name in _VIEWS or _plain(name) == "getitem"


def written(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The tensor that the operation `name` writes; None: it makes a new one."""
    if _writes_first(name) or _plain(name) == "setitem":
        return args[0] if args else None
    return kwargs.get("out")


def refusal(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], host: Sequence[torch.Tensor], gpu: Sequence[torch.Tensor]
) -> str | None:
    """What CUDA says to the operation `name` with tensors of `host` and `gpu` among its arguments; None: nothing."""
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
    """`x[indices]`, `x[indices] = value`: the indices may be the host's, the value a number."""
    indexed, indices = args[0], args[1] if len(args) > 1 else ()
    listed = indices if isinstance(indices, (tuple, list)) else (indices,)
    # An integer without dimensions is read, as a number of Python's.
    tensors = [index for index in listed if isinstance(index, torch.Tensor) and not _is_integer(index)]
    on_host = any(indexed is tensor for tensor in host)
    if on_host and not all(any(index is tensor for tensor in host) for index in tensors):
        return "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
    value = args[2] if len(args) > 2 else None
    # Without a tensor among the indices this is a copy into a view.
    if not tensors or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return None
    if any(value is tensor for tensor in host) == on_host:
        return None
    return f"{_TWO_DEVICES} (in index_put_)"
