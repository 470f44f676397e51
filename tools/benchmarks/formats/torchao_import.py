"""Owns the import of torchao without the warnings that say nothing here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

# Logger, beginning of the message, and why it says nothing.
_SAYS_NOTHING = {
    # Compiled kernels for MXFP8 and sparsity on GPUs; float8 training uses torch's own GEMM, or the emulation.
    "torchao": "Failed to load ",
    # Said to torchao's authors about a call of theirs.
    "torch.utils._pytree": "<enum 'KernelPreference'> is an Enum subclass",
}


def import_float8() -> ModuleType:
    """The module `torchao.float8`."""
    with _without_warnings():
        return import_module("torchao.float8")


@contextmanager
def _without_warnings() -> Iterator[None]:
    filters = [(logging.getLogger(name), _starts_otherwise(start)) for name, start in _SAYS_NOTHING.items()]
    for logger, keep in filters:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger, keep in filters:
            logger.removeFilter(keep)


def _starts_otherwise(start: str) -> logging.Filter:
    class StartsOtherwise(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return not record.getMessage().startswith(start)

    return StartsOtherwise()
