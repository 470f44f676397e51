"""Owns the order of a split's samples over all its token files, and the files that keep it.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.data.blend import Blend
from megatron_fp8.data.order import BlendOrder, Order, blend_order, file_order
from megatron_fp8.data.token_file import TokenIndex, read_index
from megatron_fp8.errors import BadInputError


@dataclass(frozen=True)
class SplitOrder:
    """`files`: the order of each token file, None for one that is not drawn. `blend`: None for a single file."""

    files: tuple[Order | None, ...]
    blend: BlendOrder | None

    def locate(self, number: int) -> tuple[int, int]:
        """(token file, sample of it) of the split's sample `number`."""
        if self.blend is None:
            return 0, number
        return int(self.blend.file_of[number]), int(self.blend.sample_of[number])


def blend_weights(blend: Blend, indices: Sequence[TokenIndex]) -> list[float]:
    """The blend's weights; without any, each file's number of tokens in the documents that are read."""
    if blend.weights is not None:
        return list(blend.weights)
    return [float(tokens_read(blend, index)) for index in indices]


def tokens_read(blend: Blend, index: TokenIndex) -> int:
    """Tokens of a file's documents that the blend reads."""
    documents = blend.documents(len(index.lengths_tokens))
    return int(index.lengths_tokens[documents.start : documents.stop].sum(dtype=np.int64))


def build_order(blend: Blend, seq_length: int, seed: int, num_samples: int) -> SplitOrder:
    """The order of the first `num_samples` samples of a blend's files. Raises TokenFileError for a broken index."""
    indices = [read_index(prefix) for prefix in blend.prefixes]
    blended = None
    if len(indices) > 1:
        blended = blend_order(blend_weights(blend, indices), num_samples)
    files = []
    for number, index in enumerate(indices):
        drawn = num_samples if blended is None else blended.num_samples_of(number)
        lengths = index.lengths_tokens
        documents = blend.documents(len(lengths))
        files.append(file_order(lengths, documents, seq_length, seed, drawn) if drawn else None)
    return SplitOrder(tuple(files), blended)


def save_order(order: SplitOrder, directory: Path, name: str) -> None:
    """Write the order of the split `name` as `.npy` files."""
    if order.blend is not None:
        np.save(directory / f"{name}-file.npy", order.blend.file_of)
        np.save(directory / f"{name}-sample.npy", order.blend.sample_of)
    for number, file in enumerate(order.files):
        if file is not None:
            np.save(directory / f"{name}-{number}-documents.npy", file.document_index)
            np.save(directory / f"{name}-{number}-samples.npy", file.sample_index)
            np.save(directory / f"{name}-{number}-shuffle.npy", file.shuffle_index)


def load_order(directory: Path, name: str, num_files: int) -> SplitOrder:
    """What `save_order` wrote, memory-mapped. Raises BadInputError where a file is missing or damaged."""
    blend = None
    if num_files > 1:
        blend = BlendOrder(_load(directory / f"{name}-file.npy"), _load(directory / f"{name}-sample.npy"))
    return SplitOrder(tuple(_load_file(directory, f"{name}-{number}") for number in range(num_files)), blend)


def _load_file(directory: Path, name: str) -> Order | None:
    paths = [directory / f"{name}-{part}.npy" for part in ("documents", "samples", "shuffle")]
    if not paths[0].is_file():
        return None
    return Order(*(_load(path) for path in paths))


def _load(path: Path) -> NDArray:
    try:
        # Not `np.load`, which takes archives too.
        array: NDArray = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise BadInputError(
            f"{path} cannot be read: {error}. Remove the directory {path.parent}: it is built again at the next start"
        ) from error
    return array
