"""Owns the number of threads of a process that encodes text: one, since there are as many processes as are wanted."""

from __future__ import annotations

import os


def encode_on_one_thread() -> None:
    """Keep the `tokenizers` library of this process from encoding a batch on all cores; it has no other switch."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
