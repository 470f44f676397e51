"""What Megatron Core needs changed on a CPU, and nothing that changes what it computes."""

from __future__ import annotations

import logging
from types import ModuleType


def _no_compile(jit: ModuleType) -> None:
    # torch.compile needs a C++ compiler and seconds for each function; eager gives the same numbers.
    jit.disable_jit_fuser()


class _NotTheSameGenerator(logging.Filter):
    """Drops the warning that the host's generator moved while the device's was forked: they are one here."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.msg != "CPU RNG state changed within GPU RNG context"


def _one_generator(random: ModuleType) -> None:
    logging.getLogger(random.__name__).addFilter(_NotTheSameGenerator())


MEGATRON_PATCHES = {
    "megatron.core.jit": _no_compile,
    "megatron.core.tensor_parallel.random": _one_generator,
}
