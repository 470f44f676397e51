"""Owns reading files as bytes, plain or compressed with gzip or Zstandard, from any offset of their content."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

import zstandard

from megatron_fp8.data.sources.block import InputError

COMPRESSED = (".gz", ".zst")
_CHUNK_BYTES = 2**16
# Of Zstandard's --long=31, with which large collections are packed. Only a file that was packed so takes this memory.
_LARGEST_WINDOW_BYTES = 2**31


class Stream:
    """The content of a file; a context manager. Reading raises InputError for damaged compressed data."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        """`offset`: bytes of content to leave out; compressed files are decompressed up to there."""
        self._path = path
        self._file = path.open("rb")
        self._read: Callable[[int], bytes]
        if path.suffix == ".gz":
            self._read = cast(BinaryIO, gzip.GzipFile(fileobj=self._file)).read
        elif path.suffix == ".zst":
            self._read = _Zstandard(self._file).read
        else:
            self._file.seek(offset)
            self._read = self._file.read
            offset = 0
        while offset > 0:
            skipped = len(self.read(min(offset, 2**20)))
            if skipped == 0:
                raise InputError(f"{path} is shorter than it was")
            offset -= skipped

    @property
    def stored_bytes(self) -> int:
        """Bytes of the file, as it is stored, that were read."""
        return self._file.tell()

    def read(self, most_bytes: int) -> bytes:
        """The next bytes of the content, none at its end."""
        try:
            return self._read(most_bytes)
        except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError, EOFError) as error:
            raise InputError(f"{self._path} is damaged or cut off: {error}. Nothing after this can be read") from error

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class _Zstandard:
    """Decompression of all frames of a file; unlike the library's reader it notices when the last is cut off."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame = self._next_frame()
        self._started = False
        self._ready = b""

    def read(self, most_bytes: int) -> bytes:
        while not self._ready:
            stored = self._file.read(_CHUNK_BYTES)
            if not stored:
                if self._started:
                    raise EOFError("it ends inside a frame")
                return b""
            parts = []
            while stored:
                self._started = True
                parts.append(self._frame.decompress(stored))
                stored = self._frame.unused_data
                if self._frame.eof:
                    self._frame = self._next_frame()
                    self._started = False
            self._ready = b"".join(parts)
        part, self._ready = self._ready[:most_bytes], self._ready[most_bytes:]
        return part

    @staticmethod
    def _next_frame() -> zstandard.ZstdDecompressionObj:
        return zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES).decompressobj()
