"""`torch.cuda` and `torch.accelerator` on a machine without CUDA: a table of what each name does on a CPU.

The device reports itself as an H100 (`sm_90`), so that Transformer Engine and Megatron Core choose the same code paths.
A name that is missing from the table raises NotImplementedError with that name when called. All devices of a process
share one random number generator, which is not the host's (`generators`).
"""

# ruff: noqa: ARG001, ARG002, ARG005  (the signatures are torch's)
from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

import psutil
import torch

from megatron_fp8.cpu import generators, memory, streams, transfers
from megatron_fp8.cpu.placement import put_on_host

CAPABILITY = (9, 0)
DEVICE_NAME = "NVIDIA H100 (CPU stand-in)"
# Transformer Engine compares this with the versions that its recipes need.
CUDA_VERSION = "13.0"


@dataclass(frozen=True)
class DeviceProperties:
    """`torch.cuda.get_device_properties`: an H100's, with this machine's memory (bytes)."""

    name: str = DEVICE_NAME
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    total_memory: int = 0
    multi_processor_count: int = 132
    warp_size: int = 32
    max_threads_per_block: int = 1024
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 48 * 1024
    shared_memory_per_block_optin: int = 227 * 1024
    shared_memory_per_multiprocessor: int = 228 * 1024
    L2_cache_size: int = 50 * 2**20
    is_integrated: int = 0
    is_multi_gpu_board: int = 0


class _Device:
    """`torch.cuda.device(index)`: makes `index` the current device inside the block."""

    def __init__(self, device: Any) -> None:
        self.idx = _device_index(device) if device is not None else -1

    def __enter__(self) -> None:
        self.prev_idx = streams.exchange_device(self.idx)

    def __exit__(self, *exc: Any) -> None:
        streams.exchange_device(self.prev_idx)


class _DeviceOf(_Device):
    """`torch.cuda.device_of(tensor)`: every tensor is on the current device."""

    def __init__(self, tensor: Any) -> None:
        super().__init__(None)


class _DefaultGenerators(Sequence[torch.Generator]):
    """`torch.cuda.default_generators`: the same one for every device."""

    def __len__(self) -> int:
        return device_count()

    def __getitem__(self, index: Any) -> Any:
        range(len(self))[index]
        return generators.GPU


class _Nvtx:
    """NVTX's range functions, without a profiler."""

    def __init__(self) -> None:
        for name in ("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA"):
            setattr(self, name, lambda *args: 0)
        for name in ("deviceRangeStart", "deviceRangeEnd"):
            setattr(self, name, lambda *args: None)


def _device_index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return streams.current_device() if index is None else index


def device_count() -> int:
    """One device per process that `torchrun` starts on this machine."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def set_device(device: Any) -> None:
    """Make `device` current. Raises ValueError for one that does not exist."""
    index = _device_index(device)
    if index >= device_count():
        raise ValueError(
            f"torch.cuda.set_device({device!r}): the CPU stand-in has {device_count()} device(s), "
            "one for each process of LOCAL_WORLD_SIZE"
        )
    streams.exchange_device(index)


def get_device_properties(device: Any = None) -> DeviceProperties:
    """See `DeviceProperties`."""
    return DeviceProperties(total_memory=psutil.virtual_memory().total)


def _synchronize(device: Any = None) -> None:
    transfers.finish_all()


def _call_now(function: Callable[[], object], **kwargs: Any) -> None:
    function()


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Already done, or not needed, on a CPU."""


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _missing(name: str) -> Callable[..., NoReturn]:
    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} has no CPU stand-in")

    missing.__name__ = missing.__qualname__ = name.rpartition(".")[2]
    return missing


def _missing_class(name: str) -> type:
    # A class, because programs subclass it and use isinstance.
    return type(name.rpartition(".")[2], (), {"__init__": _missing(name), "__doc__": "Not in the CPU stand-in."})


def _table() -> dict[str, Any]:
    """Names of `torch.cuda` that work, and what each is on a CPU."""
    return {
        **dict.fromkeys(("is_available", "is_initialized", "can_device_access_peer"), _answer(True)),
        **dict.fromkeys(("is_bf16_supported", "is_tf32_supported"), _answer(True)),
        **dict.fromkeys(("init", "_lazy_init", "empty_cache", "ipc_collect"), _nothing),
        **dict.fromkeys(("set_per_process_memory_fraction", "set_sync_debug_mode"), _nothing),
        "_lazy_call": _call_now,
        "device_count": device_count,
        "_device_count_nvml": device_count,
        "current_device": streams.current_device,
        "set_device": set_device,
        "_exchange_device": streams.exchange_device,
        "_maybe_exchange_device": streams.exchange_device,
        "device": _Device,
        "device_of": _DeviceOf,
        "get_device_capability": _answer(CAPABILITY),
        "get_device_name": _answer(DEVICE_NAME),
        "get_device_properties": get_device_properties,
        "get_arch_list": _answer([f"sm_{CAPABILITY[0]}{CAPABILITY[1]}"]),
        "synchronize": _synchronize,
        "get_sync_debug_mode": _answer(0),
        "is_current_stream_capturing": _answer(False),
        "caching_allocator_disabled": contextlib.nullcontext,
        "Stream": streams.Stream,
        "ExternalStream": streams.ExternalStream,
        "get_stream_from_external": streams.ExternalStream,
        "Event": streams.Event,
        "StreamContext": streams.StreamContext,
        "stream": streams.StreamContext,
        "set_stream": streams.set_stream,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "default_generators": _DefaultGenerators(),
        **memory.FUNCTIONS,
    }


# Names of torch.cuda that work unchanged, on `default_generators`.
_KEPT_NAMES = (
    "get_rng_state get_rng_state_all set_rng_state set_rng_state_all manual_seed manual_seed_all "
    "seed seed_all initial_seed cudaStatus CudaError DeferredCudaCallError"
)


def _submodules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if (name == "torch.cuda" or name.startswith("torch.cuda.")) and module is not None
    ]


def _replace(name: str, original: Any, replacement: Any) -> None:
    # torch.cuda's submodules import from each other by name.
    for module in _submodules():
        if vars(module).get(name, _replace) is original:
            setattr(module, name, replacement)


def patch_cuda() -> None:
    """Replace every public name of `torch.cuda` by its stand-in, or by one that raises NotImplementedError."""
    table = _table()
    for name, replacement in table.items():
        _replace(name, getattr(torch.cuda, name, None), replacement)
        setattr(torch.cuda, name, replacement)
    for name in torch.cuda.__all__:
        original = getattr(torch.cuda, name, None)
        if name in table or name in _KEPT_NAMES.split() or isinstance(original, ModuleType) or not callable(original):
            continue
        if name.endswith(("Tensor", "Storage")):
            continue
        full_name = f"torch.cuda.{name}"
        missing = _missing_class(full_name) if isinstance(original, type) else _missing(full_name)
        _replace(name, original, missing)
    memory.patch_storages()
    _replace("get_rng_state", torch.cuda.get_rng_state, _state_on_host(torch.cuda.get_rng_state))
    torch.cuda.nvtx._nvtx = _Nvtx()  # type: ignore[assignment]
    torch.version.cuda = CUDA_VERSION


def _state_on_host(get_state: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(get_state)
    def state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return put_on_host(get_state(*args, **kwargs))

    return state


def _current_accelerator(check_available: bool = False) -> torch.device:
    return torch.device("cuda")


def _cuda(name: str) -> Callable[..., Any]:
    """`torch.cuda.NAME`, looked up when called: the stand-in may still replace it."""
    return lambda *args, **kwargs: getattr(torch.cuda, name)(*args, **kwargs)


# torch.accelerator's functions: those named as in torch.cuda, and those with another name there.
_ACCELERATOR_NAMES = (
    "is_available device_count get_device_capability current_stream set_stream synchronize empty_cache "
    "memory_allocated memory_reserved max_memory_allocated max_memory_reserved memory_stats reset_peak_memory_stats"
)
_ACCELERATOR_RENAMED = {
    "current_device_index": "current_device",
    "current_device_idx": "current_device",
    "set_device_index": "set_device",
    "set_device_idx": "set_device",
    "get_memory_info": "mem_get_info",
}


def patch_accelerator() -> None:
    """Make `torch.accelerator`, which torch's optimizers and data loaders use, report the emulated GPU."""
    torch.accelerator.current_accelerator = _current_accelerator
    for name in _ACCELERATOR_NAMES.split():
        setattr(torch.accelerator, name, _cuda(name))
    for name, cuda_name in _ACCELERATOR_RENAMED.items():
        setattr(torch.accelerator, name, _cuda(cuda_name))
