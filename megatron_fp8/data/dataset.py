"""Builds the train and validation datasets: Megatron Core's `GPTDataset`s, in our own order (`data/order.py` says why).

On machines without CUDA the stand-in must be installed before this is imported, as for every import of Megatron Core.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split as MegatronSplit
from torch.utils.data import Dataset

from megatron_fp8.config.places import DEFAULT_CACHE
from megatron_fp8.config.run_start import START, Position, samples_needed
from megatron_fp8.config.schema import Config
from megatron_fp8.data.blend import Blend, DataKeyError, train_blend, valid_blend
from megatron_fp8.data.index_cache import Key, build_cached, cache_key
from megatron_fp8.data.loader import SampleSource
from megatron_fp8.data.order import (
    HelpersError,
    Order,
    SplitOrder,
    build_order,
    compiled_helpers,
    load_order,
    save_order,
)
from megatron_fp8.data.token_file import MappedFiles, bin_path, idx_path, read_index
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.data.validation import ValidationSet, sampled_sets, whole_sets
from megatron_fp8.errors import BadInputError

Sample = dict[str, torch.Tensor]
"""A sample: `tokens`, `labels`, `position_ids` int64 [s], `loss_mask` float32 [s]."""
ORDER_VERSION = 1
"""Part of the cache key; increment it when the same settings give another order or other files."""


class DataError(BadInputError):
    """The datasets cannot be built; the message names the key or the missing part."""


@dataclass(frozen=True)
class Datasets:
    """`train`: samples in the order of the seed; None on ranks that do not read. `valid`: what evaluations read."""

    train: SampleSource | None
    valid: tuple[ValidationSet, ...]
    num_train_samples: int
    """From the start of the order to the end of the run: train_iters x global_batch_size unless a resume changed it."""


class MegatronTokenizer:
    """A tokenizer as Megatron Core's datasets need it. Samples are full, so there is no padding token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.eod = tokenizer.eod_id
        self.unique_identifiers = OrderedDict(vocab_size=self.vocab_size, eod=self.eod)


class FileSamples(GPTDataset):  # type: ignore[misc]
    """The samples of one token file in a given order, read by Megatron Core.

    Reading raises DataError for a token id outside the vocabulary, of which the validation before a run sees only some,
    and for which a GPU would report a device-side assert; ShortenedFileError when a file was truncated.
    """

    def __init__(self, prefix: str, order: Order, config: GPTDatasetConfig) -> None:
        self._order = order
        self._prefix = prefix
        file = GPTDataset.build_low_level_dataset(prefix, config)
        super().__init__(file, prefix, order.document_index, len(order.shuffle_index), MegatronSplit.train, config)
        arrays = (order.document_index, order.sample_index, order.shuffle_index)
        self._mapped = MappedFiles.under([bin_path(prefix), idx_path(prefix)], arrays)

    def _build_document_sample_shuffle_indices(self) -> tuple[Any, Any, Any]:
        return self._order.document_index, self._order.sample_index, self._order.shuffle_index

    def __getitem__(self, idx: int | None) -> Sample:
        """Sample `idx` of the order."""
        self._mapped.require_whole()
        sample: Sample = super().__getitem__(idx)
        vocab_size = self.config.tokenizer.vocab_size
        for name in ("tokens", "labels"):
            smallest, largest = (int(token) for token in torch.aminmax(sample[name]))
            if smallest < 0 or largest >= vocab_size:
                raise DataError(
                    f"{bin_path(self._prefix)} holds token id {min(smallest, 0) or largest} (sample {idx}), but the "
                    f"vocabulary has {vocab_size} tokens; run tools/data.py verify"
                )
        return sample


class BlendedSamples(Dataset[Sample]):
    """The samples of several token files in a blend's order."""

    def __init__(self, files: Sequence[FileSamples | None], order: SplitOrder) -> None:
        assert order.blend is not None
        self._files = files
        self._order = order
        self._num_samples = len(order.blend.file_of)
        self._mapped = MappedFiles.under([], (order.blend.file_of, order.blend.sample_of))

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        self._mapped.require_whole()
        number, sample = self._order.locate(index)
        file = self._files[number]
        assert file is not None  # a file without samples is not opened
        return file[sample]


def build_datasets(
    config: Config, tokenizer: Tokenizer, reads_data: bool = True, position: Position = START
) -> Datasets:
    """The datasets of a run that continues at `position`; collective over all ranks.

    One rank per disk builds the indices while the others wait. `reads_data`: whether this rank reads samples (rank 0
    must). Raises DataError for missing or invalid data paths and a Megatron Core without its compiled helpers,
    IndexCacheError for indices that cannot be built or stored, TokenFileError for a corrupt token file.
    """
    training = config.training
    draws = _draws(config, samples_needed(training, position))
    prefixes = sorted({prefix for draw in draws for prefix in draw.blend.prefixes})
    if reads_data:
        # On every rank that reads, not only the builder, so that each reports its own corrupt file.
        for prefix in prefixes:
            read_index(prefix)

    def key() -> Key:
        settings = {
            "version": ORDER_VERSION,
            "seed": training.seed,
            "seq_length": config.model.seq_length,
            "draws": [repr(draw) for draw in draws],
        }
        return cache_key(prefixes, settings)

    def build(directory: Path) -> None:
        for draw in draws:
            order = build_order(draw.blend, config.model.seq_length, training.seed, draw.num_samples)
            save_order(order, directory, draw.name)

    root = config.data.data_cache_path
    parent = Path(draws[0].blend.prefixes[0]).parent
    directory = build_cached(Path(root) if root is not None else parent / DEFAULT_CACHE, key, build, reads_data)
    datasets: list[SampleSource | None] = [None] * len(draws)
    if directory is not None:
        orders = [load_order(directory, draw.name, len(draw.blend.prefixes)) for draw in draws]
        datasets = [_dataset(config, tokenizer, draw.blend, order) for draw, order in zip(draws, orders, strict=True)]
    return Datasets(datasets[0], _validation(config, tokenizer, datasets[1:], reads_data), draws[0].num_samples)


@dataclass(frozen=True)
class _Draw:
    """`num_samples` samples of a blend, in a separate shuffled order."""

    name: str
    blend: Blend
    num_samples: int


def _draws(config: Config, num_train_samples: int) -> list[_Draw]:
    """What is read in a shuffled order: training, then each validation set."""
    training = config.training
    try:
        compiled_helpers()
        draws = [_Draw("train", train_blend(config.data), num_train_samples)]
        if training.eval_iters == 0:
            return draws
        valid = valid_blend(config.data)
    except (DataKeyError, HelpersError) as error:
        raise DataError(str(error)) from error
    if training.full_validation:
        return draws
    num_samples = training.eval_iters * training.global_batch_size
    if training.multiple_validation_sets:
        return draws + [
            _Draw(f"valid{number}", replace(valid, prefixes=(prefix,), weights=None), num_samples)
            for number, prefix in enumerate(valid.prefixes)
        ]
    return [*draws, _Draw("valid", valid, num_samples)]


def _validation(
    config: Config, tokenizer: Tokenizer, datasets: Sequence[SampleSource | None], reads_data: bool
) -> tuple[ValidationSet, ...]:
    """The validation sets; `datasets`: of those that are read in a shuffled order."""
    training = config.training
    if training.eval_iters == 0:
        return ()
    valid = valid_blend(config.data)
    if training.full_validation:
        return whole_sets(config, valid, tokenizer.eod_id, reads_data, tokenizer.vocab_size)
    return sampled_sets(config, valid, datasets, training.eval_iters * training.global_batch_size)


def _dataset(config: Config, tokenizer: Tokenizer, blend: Blend, order: SplitOrder) -> SampleSource:
    dataset_config = GPTDatasetConfig(
        random_seed=config.training.seed,
        sequence_length=config.model.seq_length,
        blend_per_split=[(list(blend.prefixes), None), None, None],
        tokenizer=MegatronTokenizer(tokenizer),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=config.data.eod_mask_loss,
        # Attention is causal without a mask, which would cost [s, s] bytes a sample.
        create_attention_mask=False,
    )
    files = [
        FileSamples(prefix, of_file, dataset_config) if of_file is not None else None
        for prefix, of_file in zip(blend.prefixes, order.files, strict=True)
    ]
    if order.blend is None:
        assert files[0] is not None
        return files[0]
    return BlendedSamples(files, order)
