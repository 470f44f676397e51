"""Owns that memory-mapped files still have the length which they had when they were mapped.

To read beyond the end of a file that has become shorter since kills the process (SIGBUS), without an exception or the
file's name. A look at the length costs a microsecond. A file that is removed or replaced by another is no harm: the one
that was mapped stays until the process ends. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.errors import BadInputError


class ShortenedFileError(BadInputError):
    """A file has become shorter while a run reads it; the text names it."""


class MappedFiles:
    """Files that are memory-mapped for as long as this object lives."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        # Held open: the path may name another file later.
        self._files = [(Path(path), Path(path).open("rb")) for path in paths]  # noqa: SIM115
        self._sizes_bytes = [os.fstat(stream.fileno()).st_size for _, stream in self._files]

    @classmethod
    def under(cls, paths: Iterable[str | Path], arrays: Iterable[NDArray]) -> MappedFiles:
        """Those at `paths` and those that `arrays` are mapped from, if they are."""
        names = (array.filename for array in arrays if isinstance(array, np.memmap))
        return cls([*paths, *(name for name in names if isinstance(name, (str, Path)))])

    def require_whole(self) -> None:
        """Raise ShortenedFileError where one has become shorter; to be asked before its memory is read."""
        for (path, stream), size_bytes in zip(self._files, self._sizes_bytes, strict=True):
            found_bytes = os.fstat(stream.fileno()).st_size
            if found_bytes < size_bytes:
                raise ShortenedFileError(
                    f"{path} has become shorter while the run reads it: {found_bytes} of {size_bytes} bytes are left. "
                    "Another program writes to the data of this run. Put the file back as it was (tools/data.py verify "
                    "looks at token files) and go on with --resume"
                )
