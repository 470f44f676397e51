"""Owns what the keys that name places on a disk are for, as a mark on each such key of the schema.

Imports nothing of the project.
"""

from __future__ import annotations

import enum


class Place(enum.Enum):
    """What a run does with the file or directory that a key names."""

    FILE = "the path of a file that can be read"
    FILE_OR_FOLDER = "the path of a file, or of a directory with it, that can be read"
    TOKEN_FILES = "prefixes of token files that can be read"
    CHECKPOINTS = "the path of a directory that can be read"
    RUNS = "the path of a directory of your own"
    CACHE = "the path of a directory that can be written to"
    IN_RUN = "the path of a directory that can be written to; null, or a relative one, for one inside the run directory"
