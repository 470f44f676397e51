"""Sets environment variables of this process for the libraries that read them. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping


def set_variables(values: Mapping[str, str]) -> None:
    """Set what the job's own environment leaves unset.

    Call before torch is imported: CUDA, its allocator and NCCL read their variables once.
    """
    for name, value in values.items():
        os.environ.setdefault(name, value)


def encode_on_one_thread() -> None:
    """Keep the `tokenizers` library from encoding on all cores of a process that is one of many workers.

    It has no other switch.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
