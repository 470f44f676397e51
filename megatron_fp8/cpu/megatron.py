"""What Megatron Core needs changed on a CPU, which is nothing that changes what it computes."""

from __future__ import annotations

from types import ModuleType


def _no_compile(jit: ModuleType) -> None:
    # torch.compile needs a C++ compiler and seconds for each function; eager gives the same numbers.
    jit.disable_jit_fuser()


MEGATRON_PATCHES = {"megatron.core.jit": _no_compile}
