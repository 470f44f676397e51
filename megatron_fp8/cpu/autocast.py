"""Autocast for device type "cuda", applied to CPU operations.

`torch.autocast("cuda", dtype)` shares its state with device type "cpu". Which operation uses which dtype is torch's CPU
autocast policy.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def _host_type(device_type: Any) -> Any:
    return "cpu" if device_type == "cuda" else device_type


def _patch_contexts() -> None:
    original_init = torch.autocast.__init__

    @functools.wraps(original_init)
    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if dtype is None:
            dtype = torch.get_autocast_dtype(device_type)
        original_init(self, _host_type(device_type), dtype, enabled, cache_enabled)

    torch.autocast.__init__ = init  # type: ignore[method-assign]


def _patch_state() -> None:
    is_enabled, get_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return is_enabled(_host_type(device_type))

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        # Outside a region each device type keeps its default: float16 for cuda, bfloat16 for cpu.
        return get_dtype(_host_type(device_type) if is_enabled("cpu") else device_type)

    def set_autocast_enabled(*args: Any) -> None:
        set_enabled("cpu" if len(args) == 1 else _host_type(args[0]), args[-1])

    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        set_dtype(device_type, dtype)
        set_dtype(_host_type(device_type), dtype)

    torch.is_autocast_enabled = is_autocast_enabled
    torch.get_autocast_dtype = get_autocast_dtype
    torch.set_autocast_enabled = set_autocast_enabled  # type: ignore[assignment]
    torch.set_autocast_dtype = set_autocast_dtype
    torch.get_autocast_gpu_dtype = lambda: get_autocast_dtype("cuda")
    torch.set_autocast_gpu_dtype = lambda dtype: set_autocast_dtype("cuda", dtype)


def patch_autocast() -> None:
    """Make device type "cuda" mean "cpu" in torch's autocast functions."""
    _patch_contexts()
    _patch_state()
