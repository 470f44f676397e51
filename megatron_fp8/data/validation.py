"""Datasets of evaluations: the validation sets of a run, and whole token files.

A loss of a whole file predicts each token exactly once. Training samples drop the last incomplete sample and never
predict the first token; here an end-of-document token precedes the first token, as it does every other document, and
the last window is padded with tokens that do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_fp8.config.layout import round_up
from megatron_fp8.config.schema import Config
from megatron_fp8.data.blend import Blend, dataset_names
from megatron_fp8.data.loader import SampleSource
from megatron_fp8.data.token_file import MappedFiles, TokenFileError, bin_path, read_index


@dataclass(frozen=True)
class ValidationSet:
    """Samples that every evaluation reads, from the first on.

    `name`: of its own series; None: it only counts in the total. `dataset`: None on ranks that do not read.
    `num_samples`: whole global batches. `weight`: of its loss in the total; None (for all sets): by its tokens.
    """

    name: str | None
    dataset: SampleSource | None
    num_samples: int
    weight: float | None = None


def sampled_sets(
    config: Config, blend: Blend, datasets: Sequence[SampleSource | None], num_samples: int
) -> tuple[ValidationSet, ...]:
    """The sets that are `num_samples` samples in shuffled order: the whole blend, or each of its files.

    `datasets`: that of the blend, or under `training.multiple_validation_sets` those of its files.
    """
    if not config.training.multiple_validation_sets:
        return (ValidationSet(None, datasets[0], num_samples),)
    return tuple(
        ValidationSet(name, dataset, num_samples, weight)
        for name, dataset, weight in zip(dataset_names(blend.prefixes), datasets, _weights(blend), strict=True)
    )


def whole_sets(
    config: Config, blend: Blend, eod_id: int, reads_data: bool, vocab_size: int | None = None
) -> tuple[ValidationSet, ...]:
    """The sets of `training.full_validation`: every file whole, the last global batch padded with empty samples.

    Raises TokenFileError for a corrupt token file. Reading raises it for ids that are not below `vocab_size`.
    """
    batch = config.training.global_batch_size
    sets = []
    for name, prefix, weight in zip(dataset_names(blend.prefixes), blend.prefixes, _weights(blend), strict=True):
        documents = blend.documents(len(read_index(prefix).lengths_tokens))
        masked = config.data.eod_mask_loss
        file = WholeFile(prefix, config.model.seq_length, eod_id, masked, None, documents, vocab_size)
        series = name if config.training.multiple_validation_sets else None
        sets.append(ValidationSet(series, file if reads_data else None, round_up(len(file), batch), weight))
    return tuple(sets)


def _weights(blend: Blend) -> Sequence[float | None]:
    if blend.weights is None:
        return [None] * len(blend.prefixes)
    return [weight / sum(blend.weights) for weight in blend.weights]


class WholeFile:
    """The windows of a token file: window i predicts tokens i s to (i + 1) s - 1 of its `num_tokens`, s = `seq_length`.

    Each token is predicted from those before it in its window and the one before the window. `num_windows`: evenly
    spaced over the file; None: all. `documents`: which of the file's documents are read, in file order; None: all.
    Indices from `len` on give samples in which no token counts, which pad the last batch. Raises TokenFileError for a
    file that cannot be read, and for an id that is not below `vocab_size` (None: unchecked), for which a GPU would
    report a device-side assert; ShortenedFileError when the file was truncated meanwhile.
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
        """Windows with tokens that count."""
        return self._num_windows

    @property
    def num_counted(self) -> int:
        """Tokens of all windows that are read, including those that `eod_mask_loss` masks."""
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
        # Padding must not end documents: where attention is reset at their ends, each token would be a document.
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
        """(first token that window `index` predicts, the one after its last); both `num_tokens` for padding."""
        if index >= self._num_windows:
            return self.num_tokens, self.num_tokens
        window = index if self._windows is None else self._windows[index]
        return window * self._seq_length, min((window + 1) * self._seq_length, self.num_tokens)

    def tokens(self, start: int, end: int) -> NDArray[np.int64]:
        """Tokens `start` to `end` - 1 of the file's concatenated documents, [end - start]."""
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
                f"{bin_path(self._prefix)} holds token id {foreign}, but the vocabulary has {self._vocab_size} tokens; "
                "run tools/data.py verify"
            )
        return ids
