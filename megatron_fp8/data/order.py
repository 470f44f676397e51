"""Owns the order of samples: which tokens the n-th sample of a token file holds, and which file of a blend comes n-th.

An endless order that depends on the seed and on the files alone, of which a run takes as much as it needs: a longer run
goes on where a shorter one would have ended. Megatron Core's own order is that of a fixed number of samples: it
shuffles all epochs of a run together, so one step more reorders everything. Here each epoch is shuffled by itself, the
first one exactly as Megatron Core does it.

An epoch is every document once, in the epoch's own order, put together to one stream of N tokens. The stream of all
epochs is cut every s = `seq_length` tokens; a sample is s tokens and the one after them. A sample belongs to the epoch
that it ends in, so e epochs have floor((e N - 1) / s) samples, and those of each are shuffled among themselves.

Imports no torch, knows no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.data.compiled_helpers import compiled_helpers

MOST_BLENDED = 2**15 - 1


@dataclass(frozen=True)
class Order:
    """The order of one token file's samples, in the form of Megatron Core's `GPTDataset`.

    Sample n is cut k = `shuffle_index[n]`: from token `sample_index[k, 1]` of document
    `document_index[sample_index[k, 0]]` to that of `sample_index[k + 1]`, which is its last label.
    """

    document_index: NDArray[np.int32]
    """Documents of the file in the order of the stream, `[num_epochs * num_documents]`."""
    sample_index: NDArray[np.integer]
    """Where each cut lies: place in `document_index`, token of the document, `[num_samples + 1, 2]`."""
    shuffle_index: NDArray[np.integer]
    """The order of the cuts, `[num_samples]`."""


@dataclass(frozen=True)
class BlendOrder:
    """Sample n of a blend is sample `sample_of[n]` of file `file_of[n]`."""

    file_of: NDArray[np.int16]
    sample_of: NDArray[np.int64]

    def num_samples_of(self, file: int) -> int:
        """How many samples of a file the blend holds."""
        return int(np.count_nonzero(self.file_of == file))


def samples_in(num_tokens: int, seq_length: int, epochs: float = 1.0) -> int:
    """Samples that end within the first `epochs` epochs of `num_tokens` tokens each."""
    return max((int(epochs * num_tokens) - 1) // seq_length, 0)


def file_order(
    lengths_tokens: NDArray[np.int32], documents: range, seq_length: int, seed: int, num_samples: int
) -> Order:
    """The first `num_samples` samples (or more: epochs are whole) of a file whose documents have these lengths.

    `documents`: those that are read. Raises ValueError where they hold fewer than two tokens: no sample ever comes.
    """
    read = np.arange(documents.start, documents.stop, dtype=np.int32)
    epoch_tokens = int(lengths_tokens[documents.start : documents.stop].sum(dtype=np.int64))
    num_epochs = _epochs_for(num_samples, epoch_tokens, seq_length)
    total = samples_in(epoch_tokens, seq_length, num_epochs)
    place_dtype = np.int32 if num_epochs * len(read) < 2**31 else np.int64
    document_index = np.empty(num_epochs * len(read), dtype=np.int32)
    sample_index = np.empty((total + 1, 2), dtype=place_dtype)
    shuffle_index: NDArray[np.integer] = np.arange(total, dtype=np.uint32 if total < 2**32 - 2 else np.int64)
    for epoch in range(num_epochs):
        generator = _epoch_generator(seed, epoch)
        first_place, first_token = epoch * len(read), epoch * epoch_tokens
        shuffled = document_index[first_place : first_place + len(read)]
        shuffled[:] = read
        generator.shuffle(shuffled)
        ends = np.cumsum(lengths_tokens[shuffled], dtype=np.int64)
        # The cuts that lie in this epoch: their tokens' places in it are below its number of tokens.
        cuts = slice(-(-first_token // seq_length), min(-(-(first_token + epoch_tokens) // seq_length), total + 1))
        tokens = np.arange(cuts.start, cuts.stop, dtype=np.int64) * seq_length - first_token
        places = np.searchsorted(ends, tokens, side="right")
        sample_index[cuts, 0] = first_place + places
        sample_index[cuts, 1] = tokens - (ends - lengths_tokens[shuffled])[places]
        begin, end = (samples_in(epoch_tokens, seq_length, number) for number in (epoch, epoch + 1))
        generator.shuffle(shuffle_index[begin:end])
    return Order(document_index, sample_index, shuffle_index)


def blend_order(weights: Sequence[float], num_samples: int) -> BlendOrder:
    """The first `num_samples` samples of files with these weights, each time from the file that is furthest behind.

    Megatron Core's compiled greedy choice, in which sample n does not depend on how many follow.
    """
    if len(weights) > MOST_BLENDED:
        raise ValueError(f"{len(weights)} token files in one blend; at most {MOST_BLENDED} have a number in the index")
    normalized = np.array(weights, dtype=np.float64) / np.sum(np.array(weights, dtype=np.float64))
    file_of = np.zeros(num_samples, dtype=np.int16)
    sample_of = np.zeros(num_samples, dtype=np.int64)
    compiled_helpers().build_blending_indices(file_of, sample_of, normalized, len(weights), num_samples, False)
    return BlendOrder(file_of, sample_of)


def _epochs_for(num_samples: int, epoch_tokens: int, seq_length: int) -> int:
    """The fewest whole epochs with `num_samples` samples; 0 for none."""
    if num_samples == 0:
        return 0
    if epoch_tokens < 1:
        raise ValueError("no tokens to make samples of")
    return -(-(num_samples * seq_length + 1) // epoch_tokens)


def _epoch_generator(seed: int, epoch: int) -> np.random.RandomState:
    """The first epoch's is Megatron Core's for `seed`; the others' seeds are drawn from seed and epoch."""
    if epoch == 0:
        return np.random.RandomState(seed)
    return np.random.RandomState(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
