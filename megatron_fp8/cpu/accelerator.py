"""`torch.accelerator` on a machine without CUDA: the emulated GPU, asked for without naming CUDA.

Torch's own optimizers, data loaders and checkpoint code ask here which accelerator there is. A CUDA build of torch
without a driver would answer "cuda" and fail at the next question; a CPU build would answer that there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _current_accelerator(check_available: bool = False) -> torch.device:  # noqa: ARG001 (torch's signature)
    return torch.device("cuda")


def _cuda(name: str) -> Callable[..., Any]:
    """`torch.cuda.NAME` as it is when it is called: the stand-in's parts may still be replaced."""
    return lambda *args, **kwargs: getattr(torch.cuda, name)(*args, **kwargs)


# Names of torch.accelerator, and those of torch.cuda that answer for them.
_FROM_CUDA = {
    "is_available": "is_available",
    "device_count": "device_count",
    "current_device_index": "current_device",
    "current_device_idx": "current_device",
    "set_device_index": "set_device",
    "set_device_idx": "set_device",
    "get_device_capability": "get_device_capability",
    "current_stream": "current_stream",
    "set_stream": "set_stream",
    "synchronize": "synchronize",
    "empty_cache": "empty_cache",
    "get_memory_info": "mem_get_info",
    "memory_allocated": "memory_allocated",
    "memory_reserved": "memory_reserved",
    "max_memory_allocated": "max_memory_allocated",
    "max_memory_reserved": "max_memory_reserved",
    "memory_stats": "memory_stats",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
}


def patch_accelerator() -> None:
    """Replace the functions of `torch.accelerator`."""
    torch.accelerator.current_accelerator = _current_accelerator
    for name, answering in _FROM_CUDA.items():
        setattr(torch.accelerator, name, _cuda(answering))
