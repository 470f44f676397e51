"""Maps device "cuda" to the CPU in torch's tensor factories and in the methods of `torch.Tensor`.

Every function of torch that takes a `device` and that Megatron Core, Transformer Engine or a GPU program
calls is replaced by one that maps a CUDA device (a string, an index, a `torch.device`) to the CPU and
otherwise calls the original. There is no mode on the dispatch path: operations on tensors cost what they cost
without the stand-in.

A tensor on the CPU answers as a tensor on the GPU where programs ask in order to choose a path (`is_cuda`,
`type()`, `get_device()`). Its `device` stays the truth, `cpu`: torch itself steers by it.
"""

# ruff: noqa: ARG001  (the signatures are torch's)
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# What CUDA devices are mapped to. Known by identity: it says that the program asked for a GPU (see `mode`).
ON_CUDA = torch.device("cpu")

# Functions of `torch` that take `device` as a keyword only.
_FACTORY_NAMES = (
    "arange asarray as_tensor bartlett_window blackman_window empty empty_like empty_permuted "
    "empty_strided eye full full_like hamming_window hann_window kaiser_window linspace logspace ones "
    "ones_like rand rand_like randint randint_like randn randn_like randperm range scalar_tensor "
    "sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor "
    "sparse_csr_tensor tensor tril_indices triu_indices zeros zeros_like "
)
_TENSOR_FACTORIES = ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"]
# Factories that may return memory of their argument: on a GPU the result is always a copy of host memory.
_ALIASING_FACTORIES = frozenset({"asarray", "as_tensor"})


def is_cuda_device(device: Any) -> bool:
    """Whether `device` names a CUDA device: "cuda", "cuda:1", an index, or a `torch.device` of type cuda."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int) and not isinstance(device, bool)


def host_device(device: Any) -> Any:
    """The device on which the stand-in computes what the program asked for on `device`."""
    return ON_CUDA if is_cuda_device(device) else device


def _mapping_device(function: Callable[..., Any], aliasing: bool = False) -> Callable[..., Any]:
    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        # Pinned memory exists to be copied to a GPU.
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        device = kwargs.get("device")
        if device is None or device is ON_CUDA or not is_cuda_device(device):
            return function(*args, **kwargs)
        kwargs["device"] = ON_CUDA
        result = function(*args, **kwargs)
        if aliasing and args and not isinstance(args[0], torch.Tensor):
            return result.clone()
        return result

    return factory


def _patch_factories() -> None:
    from torch.jit import _builtins

    # torch.set_default_device knows the factories by identity, TorchScript by a table: both must know these.
    from torch.utils._device import _device_constructors

    _device_constructors()
    for name in _FACTORY_NAMES.split():
        original = getattr(torch, name)
        factory = _mapping_device(original, name in _ALIASING_FACTORIES)
        setattr(torch, name, factory)
        script_name = _builtins._find_builtin(original)
        if script_name is not None:
            _builtins._register_builtin(factory, script_name)
    for name in _TENSOR_FACTORIES:
        setattr(torch.Tensor, name, _mapping_device(getattr(torch.Tensor, name)))
    # Quantized tensors of Transformer Engine are wrapper subclasses made "on cuda".
    torch.Tensor._make_wrapper_subclass = staticmethod(  # type: ignore[method-assign]
        _mapping_device(torch.Tensor._make_wrapper_subclass)
    )


def _patch_moves() -> None:
    original_to = torch.Tensor.to
    host = torch.device("cpu")
    original_type = torch.Tensor.type

    @functools.wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = args[0] if args else kwargs.get("device")
        if type(device) is torch.dtype:
            return original_to(self, *args, **kwargs)
        if is_cuda_device(device):
            if args:
                args = (ON_CUDA, *args[1:])
            else:
                kwargs["device"] = ON_CUDA
        elif device == "cpu" and isinstance(device, str) and len(args) < 4:
            # From a GPU this is a copy, and programs (checkpoint writers) rely on that.
            kwargs.setdefault("copy", True)
        return original_to(self, *args, **kwargs)

    @functools.wraps(torch.Tensor.cuda)
    def cuda(
        self: torch.Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        return original_to(self, ON_CUDA, non_blocking=non_blocking, memory_format=memory_format)

    @functools.wraps(torch.Tensor.cpu)
    def cpu(self: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        return original_to(self, host, copy=True, memory_format=memory_format)

    @functools.wraps(original_type)
    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            # A mode may hand the question back to this function: its answer must not be changed twice.
            name = original_type(self).replace("torch.cuda.", "torch.", 1)
            return name.replace("torch.", "torch.cuda.", 1) if self.is_cuda else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original_type(self, dtype, non_blocking, **kwargs)

    original_module_to = torch.nn.Module.to

    @functools.wraps(original_module_to)
    def module_to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        # A device index is understood by C++ only where there is an accelerator.
        if args and is_cuda_device(args[0]):
            args = (ON_CUDA, *args[1:])
        elif is_cuda_device(kwargs.get("device")):
            kwargs["device"] = ON_CUDA
        return original_module_to(self, *args, **kwargs)

    torch.nn.Module.to = module_to  # type: ignore[method-assign,assignment]
    for name, method in {"to": to, "cuda": cuda, "cpu": cpu, "type": type_}.items():
        setattr(torch.Tensor, name, method)


def _patch_questions(current_device: Callable[[], int]) -> None:
    def is_cuda(self: torch.Tensor) -> bool:
        return self.device.type == "cpu"

    def get_device(self: torch.Tensor) -> int:
        return current_device() if self.is_cuda else -1

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        """Nothing runs behind the program's back here, so no memory can be reused too early."""

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        return self

    torch.Tensor.is_cuda = property(is_cuda)  # type: ignore[assignment]
    torch.Tensor.get_device = get_device  # type: ignore[assignment]
    torch.Tensor.record_stream = record_stream  # type: ignore[assignment]
    torch.Tensor.pin_memory = pin_memory  # type: ignore[assignment]


def _patch_load() -> None:
    original_load = torch.load

    @functools.wraps(original_load)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None or is_cuda_device(map_location):
            # A file that was written on a GPU says so; there is only the CPU to put it.
            map_location = ON_CUDA
        elif isinstance(map_location, dict):
            map_location = {key: "cpu" if is_cuda_device(value) else value for key, value in map_location.items()}
        return original_load(f, map_location, *args, **kwargs)

    torch.load = load


def patch_factories(current_device: Callable[[], int]) -> None:
    """Replace the factories and methods. `current_device()` answers `Tensor.get_device()`."""
    _patch_factories()
    _patch_moves()
    _patch_questions(current_device)
    _patch_load()
