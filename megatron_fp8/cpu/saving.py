"""`torch.save` and `torch.load`: a file says of each storage whether it was the host's or a GPU's, as a GPU program's.

Must not know how tensors move.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_fp8.cpu.factories import cuda_device, is_cuda_device, place
from megatron_fp8.cpu.placement import is_on_host, real_device

_ON_GPU = "_on_gpu"
# Before torch's own, which take every storage in RAM for the host's.
_PRIORITY = 5


def _untyped(storage: Any) -> torch.UntypedStorage:
    return getattr(storage, "_untyped_storage", storage)


def _tag(storage: Any) -> str | None:
    return str(cuda_device()) if _ON_GPU in getattr(_untyped(storage), "__dict__", ()) else None


def _restore(storage: Any, location: str) -> Any:
    """The storage that was written at `location`, or is asked for there; None: this is not a GPU."""
    if not is_cuda_device(location):
        return None
    _untyped(storage).__dict__[_ON_GPU] = True
    return storage


def _wanted(location: Any) -> Any:
    # Torch makes a device of what is no text, for which C++ would look for the driver.
    if isinstance(location, torch.device):
        return str(location)
    return f"cuda:{location}" if is_cuda_device(location) and isinstance(location, int) else location


def patch_saving() -> None:
    """Mark storages where tensors are taken apart, and tensors where they are put together."""
    reduce = torch.Tensor._reduce_ex_internal
    rebuild: Callable[..., torch.Tensor] = torch._utils._rebuild_tensor
    original_load = torch.load

    def reduce_ex_internal(self: torch.Tensor, protocol: Any) -> Any:
        if real_device(self).type == "cpu" and not hasattr(self, "_quantizer") and self.layout is torch.strided:
            marks = self.untyped_storage().__dict__
            if is_on_host(self):
                marks.pop(_ON_GPU, None)
            else:
                marks[_ON_GPU] = True
        return reduce(self, protocol)

    def rebuild_tensor(storage: Any, *args: Any) -> torch.Tensor:
        tensor = rebuild(storage, *args)
        if real_device(tensor).type != "cpu":
            return tensor
        return place(tensor, on_host=_ON_GPU not in _untyped(storage).__dict__)

    @functools.wraps(original_load)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original_load(f, _wanted(map_location), *args, **kwargs)

    torch.Tensor._reduce_ex_internal = reduce_ex_internal  # type: ignore[method-assign]
    torch._utils._rebuild_tensor = rebuild_tensor
    torch.load = load
    torch.serialization.register_package(_PRIORITY, _tag, _restore)
