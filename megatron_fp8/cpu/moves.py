"""Moving tensors and modules between the host and the emulated GPU, by copies as on a GPU, and their device
attributes."""

# ruff: noqa: ARG001  (the signatures are torch's)
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_fp8.cpu import memory, streams, transfers
from megatron_fp8.cpu.factories import cuda_device, is_cuda_device, is_host_device, place
from megatron_fp8.cpu.placement import ON_HOST, HostTensor, is_on_host, put, real_device, unplaced_device

_HOST = torch.device("cpu")
_to: Callable[..., torch.Tensor] = torch.Tensor.to


def moved(tensor: torch.Tensor, to_host: bool, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    """`tensor.to(...)` another device; `kwargs`: torch's `dtype`, `memory_format`."""
    kwargs.pop("copy", None)
    if hasattr(tensor, "_quantizer"):
        device = _HOST if to_host else cuda_device()
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
        kwargs |= {"device": device, "non_blocking": non_blocking}
        kind: Any = type(tensor)
        # Not through C++, which would look for the driver.
        copied: torch.Tensor = kind.__torch_dispatch__(torch.ops.aten._to_copy.default, (kind,), (tensor,), kwargs)
        return copied
    if transfers.PENDING and not to_host:
        transfers.refuse_unfinished("to", [tensor], None)
    with torch._C.DisableTorchFunctionSubclass(), memory.COUNTER.paused():
        copied = _to(tensor, _HOST, copy=True, **kwargs)
    place(copied, to_host)
    stream = streams.current_stream()
    if not non_blocking:
        transfers.finish(transfers.on_stream(stream))
    elif to_host:
        # Torch pins the target of such a copy.
        transfers.start(transfers.pin(copied), True, stream)
    elif transfers.is_pinned(tensor):
        transfers.start(tensor, False, stream)
    return copied


def _parsed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The device (None: unchanged) and the keywords of `Tensor.to`, which takes `(device, dtype, non_blocking, copy)`,
    `(dtype, non_blocking, copy)` and `(tensor, non_blocking, copy)`."""
    kwargs = dict(kwargs)
    device = kwargs.pop("device", None)
    other = kwargs.pop("other", None)
    if args and isinstance(args[0], torch.Tensor):
        other, args = args[0], args[1:]
    elif args and type(args[0]) is not torch.dtype:
        device, args = args[0], args[1:]
        names = ("dtype", "non_blocking", "copy")
        return device, {**dict(zip(names, args, strict=False)), **kwargs}
    if other is not None:
        return other.device, {"dtype": other.dtype, **dict(zip(("non_blocking", "copy"), args, strict=False)), **kwargs}
    return device, {**dict(zip(("dtype", "non_blocking", "copy"), args, strict=False)), **kwargs}


def _patch_tensor_moves() -> None:
    original_type = torch.Tensor.type

    @functools.wraps(_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 1 and type(args[0]) is torch.dtype and not kwargs:
            return _to(self, args[0])
        device, options = _parsed(args, kwargs)
        options = {key: value for key, value in options.items() if value is not None}
        if not (device is None or is_cuda_device(device) or is_host_device(device)):
            return _to(self, *args, **kwargs)
        if real_device(self).type != "cpu":
            return _to(self, *(() if device is None else (_HOST,)), **options)
        on_host = is_on_host(self)
        if device is None or is_host_device(device) == on_host:
            # An unchanged quantized tensor is returned itself; torch has no device to parse.
            return _to(self, _HOST, **options)
        return moved(self, not on_host, **options)

    @functools.wraps(torch.Tensor.cuda)
    def cuda(
        self: torch.Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        return self.to(cuda_device(), non_blocking=non_blocking, memory_format=memory_format)

    @functools.wraps(torch.Tensor.cpu)
    def cpu(self: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        return self.to(_HOST, memory_format=memory_format)

    @functools.wraps(original_type)
    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        on_gpu = self.is_cuda
        if dtype is None:
            with torch._C.DisableTorchFunctionSubclass():
                name = original_type(self).replace("torch.cuda.", "torch.", 1)
            return name.replace("torch.", "torch.cuda.", 1) if on_gpu else name
        if isinstance(dtype, str):
            to_gpu = dtype.startswith("torch.cuda.")
            self = self if to_gpu == on_gpu else moved(self, not to_gpu, non_blocking)
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original_type(self, dtype, non_blocking, **kwargs)

    @functools.wraps(torch.Tensor.type_as)
    def type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.to(other.device, other.dtype)

    for name, method in {"to": to, "cuda": cuda, "cpu": cpu, "type": type_, "type_as": type_as}.items():
        setattr(torch.Tensor, name, method)


def _patch_module_moves() -> None:
    original = torch.nn.Module.to

    @functools.wraps(original)
    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        # C++ must not parse a GPU device: it would look for the driver.
        device, options = _parsed(args, kwargs)
        if device is None or not (is_cuda_device(device) or is_host_device(device)):
            return original(self, *args, **kwargs)
        dtype, non_blocking = options.get("dtype"), options.get("non_blocking", False)
        memory_format = options.get("memory_format")
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            raise TypeError(
                f"nn.Module.to only accepts floating point or complex dtypes, but got desired dtype={dtype}"
            )

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            cast = dtype if tensor.is_floating_point() or tensor.is_complex() else None
            if memory_format is not None and tensor.dim() in (4, 5):
                return tensor.to(device, cast, non_blocking, memory_format=memory_format)
            return tensor.to(device, cast, non_blocking)

        return self._apply(convert)

    torch.nn.Module.to = to  # type: ignore[method-assign,assignment]


def _patch_answers() -> None:
    host, gpus = _HOST, [torch.device("cuda", index) for index in range(64)]

    # Called often. HostTensor has its own properties.
    def device(self: torch.Tensor) -> torch.device:
        real = unplaced_device(self)
        if real != host or ON_HOST in self.__dict__:
            return real
        return gpus[streams.current_device()]

    def is_cuda(self: torch.Tensor) -> bool:
        real = unplaced_device(self)
        # Under a mode (`with torch.device(...)`) torch calls `device` above.
        return (real == host and ON_HOST not in self.__dict__) or real.type == "cuda"

    def get_device(self: torch.Tensor) -> int:
        return streams.current_device() if self.is_cuda else -1

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        """Nothing to do: memory is never reused before its work is finished."""

    torch.Tensor.device = property(device)  # type: ignore[assignment]
    torch.Tensor.is_cuda = property(is_cuda)  # type: ignore[assignment]
    torch.Tensor.is_cpu = property(lambda self: self.device.type == "cpu")  # type: ignore[assignment]
    torch.Tensor.get_device = get_device  # type: ignore[assignment]
    torch.get_device = get_device  # type: ignore[assignment]
    torch.Tensor.record_stream = record_stream  # type: ignore[assignment]


def _patch_memory_questions() -> None:
    """What only host memory can be: pinned, or shared with numpy."""
    numpy = torch.Tensor.numpy

    def numpy_(self: torch.Tensor, *, force: bool = False) -> Any:
        if is_on_host(self) or real_device(self).type != "cpu":
            return numpy(self, force=force)
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        if not is_on_host(self):
            raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
        return self if transfers.is_pinned(self) else transfers.pin(self.clone())

    def pinned(self: torch.Tensor, device: Any = None) -> bool:
        return isinstance(self, HostTensor) and transfers.is_pinned(self)

    torch.Tensor.numpy = numpy_  # type: ignore[method-assign,assignment]
    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign,assignment]
    torch.Tensor.is_pinned = pinned  # type: ignore[method-assign,assignment]


def _patch_waits() -> None:
    """Reading a GPU value waits for its stream."""

    def waiting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def read(self: torch.Tensor, *args: Any) -> Any:
            if transfers.PENDING and not is_on_host(self):
                transfers.finish(transfers.on_stream(streams.current_stream()))
            return method(self, *args)

        return read

    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
        setattr(torch.Tensor, name, waiting(getattr(torch.Tensor, name)))


def _patch_assignments() -> None:
    """`x.data = y` moves x to y's device; `x.grad = y` requires y on x's device."""
    data: Any = torch._C.TensorBase.data
    grad: Any = torch._C.TensorBase.grad

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            data.__set__(self, value)
        if real_device(value).type == "cpu" and is_on_host(self) != is_on_host(value):
            put(self, is_on_host(value))

    def set_grad(self: torch.Tensor, value: torch.Tensor | None) -> None:
        if value is not None and real_device(value).type == "cpu" and is_on_host(self) != is_on_host(value):
            raise RuntimeError(
                f"assigned grad has data of type {value.type()} on {value.device}, but the tensor is on {self.device}: "
                "assigned grad has data located on a different device"
            )
        with torch._C.DisableTorchFunctionSubclass():
            grad.__set__(self, value)

    torch.Tensor.data = property(data.__get__, set_data)  # type: ignore[assignment]
    torch.Tensor.grad = property(grad.__get__, set_grad, grad.__delete__)  # type: ignore[assignment]


def patch_moves() -> None:
    """Replace the methods of `torch.Tensor` and `torch.nn.Module` that move them or read their device."""
    _patch_tensor_moves()
    _patch_module_moves()
    _patch_answers()
    _patch_memory_questions()
    _patch_waits()
    _patch_assignments()
