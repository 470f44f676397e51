"""torch's tensor factories, for the host and for the emulated GPU.

Functions of torch with a `device` argument are replaced by ones that create the tensor in RAM and mark where it is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from megatron_fp8.cpu import generators, memory, streams, transfers
from megatron_fp8.cpu.placement import HostParameter, HostTensor, is_on_host, put, put_on_gpu, put_on_host, real_device

# Functions of `torch` that take `device` as a keyword only.
_FACTORY_NAMES = (
    "arange asarray as_tensor bartlett_window blackman_window empty empty_permuted empty_strided eye full "
    "hamming_window hann_window kaiser_window linspace logspace ones rand randint randn randperm range scalar_tensor "
    "sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor "
    "sparse_csr_tensor tensor tril_indices triu_indices zeros "
)
_LIKE_NAMES = "empty_like full_like ones_like rand_like randint_like randn_like zeros_like"
_METHOD_NAMES = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros"
_DRAW_LIKE = frozenset({"rand_like", "randn_like", "randint_like"})
_DRAWS = frozenset({"rand", "randn", "randint", "randperm"})
# May return their argument's memory; on a GPU the result is always a copy of host memory.
_FROM_DATA = frozenset({"asarray", "as_tensor", "tensor"})
_HOST = torch.device("cpu")
_GPU = torch.device("cuda")


class _Default(threading.local):
    """The default device (`torch.set_default_device`); None: the host. Inside a kernel it is the GPU."""

    device: torch.device | None = None
    in_kernel: bool = False


_default = _Default()


def default_device() -> torch.device | None:
    """The default device of factories, if one is set."""
    if _default.in_kernel:
        return _GPU
    # `with torch.device(...)` pushes its mode without a call that could be replaced.
    if _len_torch_function_stack():
        for mode in reversed(_get_current_function_mode_stack()):
            if isinstance(mode, DeviceContext):
                return mode.device
    return _default.device


def enter_kernel() -> bool:
    """Make the GPU the default device; returns the argument of `leave_kernel`."""
    before = _default.in_kernel
    _default.in_kernel = True
    return before


def leave_kernel(before: bool) -> None:
    """Undo `enter_kernel`."""
    _default.in_kernel = before


def exchange_default_device(device: torch.device | None) -> torch.device | None:
    """Set the default device; returns the previous one."""
    before = _default.device
    _default.device = device
    return before


def is_cuda_device(device: Any) -> bool:
    """Whether `device` names a CUDA device: "cuda", "cuda:1", an index, or a `torch.device` of type cuda."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int) and not isinstance(device, bool)


def is_host_device(device: Any) -> bool:
    """Whether `device` names the host."""
    return device == "cpu" if isinstance(device, str) else isinstance(device, torch.device) and device.type == "cpu"


def cuda_device() -> torch.device:
    """The emulated GPU of this process."""
    return torch.device("cuda", streams.current_device())


def place(tensor: torch.Tensor, on_host: bool, pin_memory: bool = False) -> torch.Tensor:
    """Mark where a new tensor is; with `pin_memory` it must be on the host."""
    if pin_memory:
        if not on_host:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        transfers.pin(tensor)
    if on_host:
        return put_on_host(tensor)
    if memory.COUNTER.is_on:
        memory.COUNTER.add(tensor)
    return put_on_gpu(tensor)


def _factory(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    draws, from_data = name in _DRAWS, name in _FROM_DATA

    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        if out is not None:
            call = generators.call_on_host if is_on_host(out) else generators.call_on_gpu
            return call(name, function, args, kwargs)
        data = args[0] if from_data and args else None
        if isinstance(data, torch.Tensor):
            return _from_tensor(name, function, *args, **kwargs)
        device = kwargs.get("device")
        if device is None:
            device = default_device()
        on_gpu = is_cuda_device(device)
        if not on_gpu and device is not None and not is_host_device(device):
            return function(*args, **kwargs, **({} if "device" in kwargs else {"device": device}))
        pin_memory = kwargs.pop("pin_memory", False)
        if device is not None:
            kwargs["device"] = _HOST
        if draws:
            generators.expect_generator(kwargs.get("generator"), not on_gpu)
            if not on_gpu and kwargs.get("generator") is None:
                kwargs["generator"] = generators.HOST
        result = function(*args, **kwargs)
        if on_gpu and from_data and name != "tensor":
            result = result.clone()
        return place(result, not on_gpu, pin_memory)

    return factory


def _from_tensor(name: str, function: Callable[..., Any], data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`torch.tensor`, `as_tensor` and `asarray` of a tensor: on its device unless one is given."""
    device = kwargs.pop("device", None)
    device = default_device() if device is None and name != "tensor" else device
    on_host = is_on_host(data)
    if device is None or not (is_cuda_device(device) or is_host_device(device)):
        made = function(data, *args, **kwargs, **({} if device is None else {"device": device}))
    elif is_host_device(device) == on_host:
        made = function(data, *args, **kwargs)
    else:
        made = function(data.to(device), *args, **kwargs)
        on_host = not on_host
    return made if made is data or real_device(made).type != "cpu" else put(made, on_host)


def _like(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A factory that defaults to the device of its first argument."""

    @functools.wraps(function)
    def factory(like: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        pin_memory = kwargs.pop("pin_memory", False)
        on_host = is_on_host(like)
        if device is not None:
            if not (is_cuda_device(device) or is_host_device(device)):
                return function(like, *args, **kwargs)
            wanted = is_host_device(device)
            if wanted == on_host or type(like) in (torch.Tensor, torch.nn.Parameter, HostTensor, HostParameter):
                # Other classes, quantized tensors, create their own and need the device.
                kwargs["device"] = _HOST if real_device(like).type != "cpu" else None
            on_host = wanted
        if name in _DRAW_LIKE and on_host != is_on_host(like):
            call = generators.call_on_host if on_host else generators.call_on_gpu
            with torch._C.DisableTorchFunctionSubclass():
                result = call(name, function, (like, *args), kwargs)
        else:
            result = function(like, *args, **kwargs)
        return place(result, on_host, pin_memory) if real_device(result).type == "cpu" else result

    return factory


def _patch_factories() -> None:
    from torch.jit import _builtins

    # torch.set_default_device recognizes factories by identity, TorchScript by a table: register these with both.
    from torch.utils._device import _device_constructors

    _device_constructors()
    for names, make in ((_FACTORY_NAMES, _factory), (_LIKE_NAMES, _like)):
        for name in names.split():
            original = getattr(torch, name)
            factory = make(name, original)
            setattr(torch, name, factory)
            script_name = _builtins._find_builtin(original)
            if script_name is not None:
                _builtins._register_builtin(factory, script_name)
    for name in _METHOD_NAMES.split():
        setattr(torch.Tensor, name, _like(name, getattr(torch.Tensor, name)))
    for name in ("fftfreq", "rfftfreq"):
        setattr(torch.fft, name, _factory(name, getattr(torch.fft, name)))


def _on_host(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        return put_on_host(function(*args, **kwargs))

    return make


def _patch_classes_of_tensors() -> None:
    """Tensors created by calling a class."""
    make_wrapper = torch.Tensor._make_wrapper_subclass
    new_parameter = torch.nn.Parameter.__new__

    # Quantized tensors of Transformer Engine.
    def wrapper(cls: type, size: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        kwargs.pop("pin_memory", None)
        if not is_cuda_device(device):
            made: torch.Tensor = make_wrapper(cls, size, *args, **kwargs)
            return put_on_host(made) if device is None or is_host_device(device) else made
        kwargs["device"] = _HOST
        return make_wrapper(cls, size, *args, **kwargs)

    def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        data = torch.empty(0) if data is None else data
        if cls is torch.nn.Parameter and isinstance(data, HostTensor):
            cls = HostParameter
        if issubclass(cls, HostParameter):
            return torch.Tensor._make_subclass(cls, data, requires_grad)
        return new_parameter(cls, data, requires_grad)

    torch.Tensor._make_wrapper_subclass = staticmethod(wrapper)  # type: ignore[method-assign,assignment]
    torch.nn.Parameter.__new__ = staticmethod(parameter)  # type: ignore[method-assign]


def patch_factories() -> None:
    """Replace the factories of `torch` and of `torch.Tensor`."""
    _patch_factories()
    _patch_classes_of_tensors()
    for name in ("from_numpy", "frombuffer", "from_file"):
        setattr(torch, name, _on_host(getattr(torch, name)))
