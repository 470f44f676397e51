"""The order of samples: which tokens the n-th sample of a token file holds, and which file of a blend comes n-th.

An endless order that depends only on the seed and the files, of which a run takes as much as it needs: a longer run
continues where a shorter one would have ended. Megatron Core orders a fixed number of samples: it shuffles all epochs
of a run together, so one more step reorders everything. Here each epoch is shuffled separately, the first exactly as
in Megatron Core.

An epoch is every document once, in the epoch's own order, concatenated to N tokens. The concatenation of all epochs is
cut every s = `seq_length` tokens; a sample is s tokens and the one after them. A sample belongs to the epoch in which
it ends, so e epochs have floor((e N - 1) / s) samples, and those of each epoch are shuffled.

Imports no torch.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_fp8.data.blend import Blend
from megatron_fp8.data.token_file import TokenIndex, read_index
from megatron_fp8.errors import BadInputError

MAX_BLENDED = 2**15 - 1
_HELPERS = "megatron.core.datasets.helpers_cpp"


class HelpersError(BadInputError):
    """Megatron Core or its compiled helpers are not installed."""


@dataclass(frozen=True)
class Order:
    """The order of one token file's samples, in the form of Megatron Core's `GPTDataset`.

    Sample n is cut k = `shuffle_index[n]`: from token `sample_index[k, 1]` of document
    `document_index[sample_index[k, 0]]` to that of `sample_index[k + 1]`, which is its last label.
    """

    document_index: NDArray[np.int32]
    """Documents of the file in the order they are concatenated, `[num_epochs * num_documents]`."""
    sample_index: NDArray[np.integer]
    """Each cut: index into `document_index`, token of that document, `[num_samples + 1, 2]`."""
    shuffle_index: NDArray[np.integer]
    """The order of the cuts, `[num_samples]`."""


@dataclass(frozen=True)
class BlendOrder:
    """Sample n of a blend is sample `sample_of[n]` of file `file_of[n]`."""

    file_of: NDArray[np.int16]
    sample_of: NDArray[np.int64]


def samples_in(num_tokens: int, seq_length: int, epochs: float = 1.0) -> int:
    """Samples that end within the first `epochs` epochs of `num_tokens` tokens each."""
    return max((int(epochs * num_tokens) - 1) // seq_length, 0)


def file_order(
    lengths_tokens: NDArray[np.int32], documents: range, seq_length: int, seed: int, num_samples: int
) -> Order:
    """The first `num_samples` samples (or more: epochs are whole) of a file whose documents have these lengths.

    `documents`: those that are read. Raises ValueError if they are empty: there would never be a sample.
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
        # The cuts inside this epoch.
        cuts = slice(-(-first_token // seq_length), min(-(-(first_token + epoch_tokens) // seq_length), total + 1))
        tokens = np.arange(cuts.start, cuts.stop, dtype=np.int64) * seq_length - first_token
        places = np.searchsorted(ends, tokens, side="right")
        sample_index[cuts, 0] = first_place + places
        sample_index[cuts, 1] = tokens - (ends - lengths_tokens[shuffled])[places]
        begin, end = (samples_in(epoch_tokens, seq_length, number) for number in (epoch, epoch + 1))
        generator.shuffle(shuffle_index[begin:end])
    return Order(document_index, sample_index, shuffle_index)


def blend_order(weights: Sequence[float], num_samples: int) -> BlendOrder:
    """The first `num_samples` samples of files with these weights, each from the file that is furthest behind.

    Megatron Core's compiled greedy choice, in which sample n does not depend on how many follow.
    """
    if len(weights) > MAX_BLENDED:
        raise ValueError(f"{len(weights)} token files in one blend; at most {MAX_BLENDED} are supported")
    normalized = np.array(weights, dtype=np.float64) / np.sum(np.array(weights, dtype=np.float64))
    file_of = np.zeros(num_samples, dtype=np.int16)
    sample_of = np.zeros(num_samples, dtype=np.int64)
    compiled_helpers().build_blending_indices(file_of, sample_of, normalized, len(weights), num_samples, False)
    return BlendOrder(file_of, sample_of)


def _epochs_for(num_samples: int, epoch_tokens: int, seq_length: int) -> int:
    """The fewest whole epochs with `num_samples` samples."""
    if num_samples == 0:
        return 0
    if epoch_tokens < 1:
        raise ValueError("the documents have no tokens")
    return -(-(num_samples * seq_length + 1) // epoch_tokens)


def _epoch_generator(seed: int, epoch: int) -> np.random.RandomState:
    """The first epoch's is Megatron Core's for `seed`; the others' seeds are drawn from seed and epoch."""
    if epoch == 0:
        return np.random.RandomState(seed)
    return np.random.RandomState(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])


@functools.cache
def compiled_helpers() -> ModuleType:
    """Megatron Core's compiled index helpers. Raises HelpersError if there are none.

    Loaded without importing Megatron Core, which imports torch.
    """
    if _HELPERS in sys.modules:
        return sys.modules[_HELPERS]
    # Finds the package without running its code.
    package = importlib.util.find_spec("megatron.core")
    for place in (package and package.submodule_search_locations) or ():
        for suffix in EXTENSION_SUFFIXES:
            path = Path(place) / "datasets" / f"helpers_cpp{suffix}"
            if path.is_file():
                return _load_extension(path)
    raise HelpersError(
        f"megatron-core has no compiled {_HELPERS} for Python {platform.python_version()} on {platform.machine()}; "
        "install a wheel of megatron-core for this platform, or compile it with pybind11 and a C++ compiler"
    )


def _load_extension(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_HELPERS, path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise HelpersError(f"{path} cannot be loaded: {error}; reinstall megatron-core") from error
    return module


@dataclass(frozen=True)
class SplitOrder:
    """The order of samples over all token files of a blend.

    `files`: the order of each, None for one without samples. `blend`: None for a single file.
    """

    files: tuple[Order | None, ...]
    blend: BlendOrder | None

    def locate(self, number: int) -> tuple[int, int]:
        """(token file, its sample) of sample `number`."""
        if self.blend is None:
            return 0, number
        return int(self.blend.file_of[number]), int(self.blend.sample_of[number])


def tokens_read(blend: Blend, index: TokenIndex) -> int:
    """Tokens of a file's documents that the blend reads."""
    documents = blend.documents(len(index.lengths_tokens))
    return int(index.lengths_tokens[documents.start : documents.stop].sum(dtype=np.int64))


def build_order(blend: Blend, seq_length: int, seed: int, num_samples: int) -> SplitOrder:
    """The order of the first `num_samples` samples of a blend's files. Raises TokenFileError for a corrupt index."""
    indices = [read_index(prefix) for prefix in blend.prefixes]
    blended = None
    if len(indices) > 1:
        blended = blend_order(blend.weights or [tokens_read(blend, index) for index in indices], num_samples)
    files = []
    for number, index in enumerate(indices):
        drawn = num_samples if blended is None else int(np.count_nonzero(blended.file_of == number))
        lengths = index.lengths_tokens
        documents = blend.documents(len(lengths))
        files.append(file_order(lengths, documents, seq_length, seed, drawn) if drawn else None)
    return SplitOrder(tuple(files), blended)


def save_order(order: SplitOrder, directory: Path, name: str) -> None:
    """Write the order as `.npy` files whose names begin with `name`."""
    if order.blend is not None:
        np.save(directory / f"{name}-file.npy", order.blend.file_of)
        np.save(directory / f"{name}-sample.npy", order.blend.sample_of)
    for number, file in enumerate(order.files):
        if file is not None:
            np.save(directory / f"{name}-{number}-documents.npy", file.document_index)
            np.save(directory / f"{name}-{number}-samples.npy", file.sample_index)
            np.save(directory / f"{name}-{number}-shuffle.npy", file.shuffle_index)


def load_order(directory: Path, name: str, num_files: int) -> SplitOrder:
    """What `save_order` wrote, memory-mapped. Raises BadInputError for a missing or corrupt file."""
    blend = None
    if num_files > 1:
        blend = BlendOrder(_load(directory / f"{name}-file.npy"), _load(directory / f"{name}-sample.npy"))
    return SplitOrder(tuple(_load_file(directory, f"{name}-{number}") for number in range(num_files)), blend)


def _load_file(directory: Path, name: str) -> Order | None:
    paths = [directory / f"{name}-{part}.npy" for part in ("documents", "samples", "shuffle")]
    if not paths[0].is_file():
        return None
    return Order(*(_load(path) for path in paths))


def _load(path: Path) -> NDArray[Any]:
    # Not `np.load`, which also reads archives.
    open_array: Callable[..., NDArray[Any]] = np.lib.format.open_memmap
    try:
        return open_array(path, mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise BadInputError(
            f"{path} cannot be read: {error}. Remove the directory {path.parent}; the next start rebuilds it"
        ) from error
