"""Owns the reading of a token file in file order, each token predicted exactly once: what a loss of a whole file means.

Training's samples drop what does not fill a last one, and the first token, which nothing predicts. Here an
end-of-document token stands before the first token, as before that of every other document, and the last window is
filled up with tokens that do not count. Must not know ranks, devices or batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_fp8.data.mapped_files import MappedFiles
from megatron_fp8.data.token_file import TokenFileError, bin_path, read_index


class WholeFile:
    """The windows of a token file: window i predicts tokens i s to (i + 1) s - 1 of its `num_tokens`, s = `seq_length`.

    Each token is predicted from those before it in its window and the one before the window. `num_windows`: read only
    so many windows, evenly spaced over the file; None: all. `documents`: which of the file's documents are read, in its
    order; None: all. Indices from `len` on give samples in which no token
    counts, with which a last batch is filled up. Raises TokenFileError for a file that cannot be read, and when an id
    is read that is not below `vocab_size` (None: any may be): a GPU would say "device-side assert". ShortenedFileError
    where the file lost its end meanwhile.
    """

    def __init__(
        self,
        prefix: str | Path,
        seq_length: int,
        eod_id: int,
        eod_mask_loss: bool = False,
        num_windows: int | None = None,
        documents: range | None = None,
        vocab_size: int | None = None,
    ) -> None:
        index = read_index(prefix)
        self._prefix = prefix
        self._vocab_size = vocab_size
        read = slice(None) if documents is None else slice(documents.start, documents.stop)
        self._seq_length = seq_length
        self._eod_id = eod_id
        self._eod_mask_loss = eod_mask_loss
        self._ends = np.cumsum(index.lengths_tokens[read], dtype=np.int64)
        self._offsets = index.offsets_bytes[read] // index.dtype.itemsize
        self.num_tokens = int(self._ends[-1]) if len(self._ends) else 0
        self._tokens: NDArray[np.integer] = (
            np.memmap(bin_path(prefix), dtype=index.dtype, mode="r") if self.num_tokens else np.empty(0, index.dtype)
        )
        self._mapped = MappedFiles([bin_path(prefix)] if self.num_tokens else [])
        available = -(-self.num_tokens // seq_length)
        chosen = available if num_windows is None else min(num_windows, available)
        self._windows = [number * available // chosen for number in range(chosen)] if chosen < available else None
        self._num_windows = chosen

    def __len__(self) -> int:
        """Windows that hold tokens that count."""
        return self._num_windows

    @property
    def num_counted(self) -> int:
        """Tokens of all windows that are read, those that `eod_mask_loss` leaves out included."""
        bounds = [self.bounds(index) for index in range(len(self))] if self._windows is not None else []
        return self.num_tokens if self._windows is None else sum(end - first for first, end in bounds)

    def each_document(self) -> Iterator[NDArray[np.int64]]:
        """The tokens of one document after another."""
        start = 0
        for end in self._ends:
            yield self.tokens(start, int(end))
            start = int(end)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """`tokens`, `labels`, `position_ids` int64 [s], `loss_mask` float32 [s]."""
        first, end = self.bounds(index)
        # What fills up must not end documents: each would be one of its own to attention that keeps them apart.
        ids = np.full(self._seq_length + 1, 0 if self._eod_id else 1, dtype=np.int64)
        ids[0] = self._eod_id
        start = max(first - 1, 0)
        ids[start - first + 1 : end - first + 1] = self.tokens(start, end)
        text = torch.from_numpy(ids)
        tokens, labels = text[:-1], text[1:]
        loss_mask = (torch.arange(self._seq_length) < end - first).float()
        if self._eod_mask_loss:
            loss_mask[tokens == self._eod_id] = 0.0
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": loss_mask,
            "position_ids": torch.arange(self._seq_length),
        }

    def bounds(self, index: int) -> tuple[int, int]:
        """(first token that window `index` predicts, the one after its last); both `num_tokens` beyond the last."""
        if index >= self._num_windows:
            return self.num_tokens, self.num_tokens
        window = index if self._windows is None else self._windows[index]
        return window * self._seq_length, min((window + 1) * self._seq_length, self.num_tokens)

    def tokens(self, start: int, end: int) -> NDArray[np.int64]:
        """Tokens `start` to `end` - 1 of the file's documents one after another, [end - start]."""
        self._mapped.require_whole()
        parts = []
        document = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            stop = min(end, int(self._ends[document]))
            # Counted from the document's end: documents may lie in any order, with gaps between them.
            shift = int(self._offsets[document]) - (int(self._ends[document - 1]) if document else 0)
            parts.append(self._tokens[start + shift : stop + shift])
            start, document = stop, document + 1
        ids = np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
        if self._vocab_size is not None and len(ids) and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            foreign = ids[(ids < 0) | (ids >= self._vocab_size)][0]
            raise TokenFileError(
                f"{bin_path(self._prefix)} holds token id {foreign}, the vocabulary has {self._vocab_size} tokens: "
                "tools/data.py verify finds every such id"
            )
        return ids
