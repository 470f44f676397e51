"""Owns putting a config's environment variables into this process, for the libraries that read them when they start.

Must not know which variables there are. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def set_variables(values: Mapping[str, str]) -> None:
    """Set what the job's own environment leaves unset.

    Must run before torch is imported: CUDA, its allocator and NCCL look once.
    """
    for name, value in values.items():
        os.environ.setdefault(name, value)
