"""Owns the making of train and validation datasets: config and token files -> Megatron Core's `GPTDataset`s.

Must not know ranks' coordinates (the caller says whether this rank reads), devices or batches. On machines
without CUDA the stand-in must be in place before this is imported, as for every import of Megatron Core.
"""

from __future__ import annotations

import platform
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch.utils.data import Dataset

from megatron_fp8.config.problem import BadInputError
from megatron_fp8.config.schema import Config
from megatron_fp8.data.blend import Blend, BlendError, parse_blend
from megatron_fp8.data.index_cache import build_cached, cache_key
from megatron_fp8.data.token_file import read_index
from megatron_fp8.data.tokenizer import Tokenizer

Sample = dict[str, torch.Tensor]
"""What a dataset gives: `tokens`, `labels`, `position_ids` int64 [s], `loss_mask` float32 [s]."""


class DataError(BadInputError):
    """The datasets cannot be made; the text names the key or the missing part."""


@dataclass(frozen=True)
class Datasets:
    """Samples in the order of the seed; None: this rank does not read, or there is no validation."""

    train: Dataset[Sample] | None
    valid: Dataset[Sample] | None
    num_train_samples: int
    """train_iters x global_batch_size."""
    num_valid_samples: int
    """eval_iters x global_batch_size: the same samples at every evaluation."""


class MegatronTokenizer:
    """What Megatron Core's datasets ask of a tokenizer. There is no padding token: samples are full."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.eod = tokenizer.eod_id
        # Part of Megatron's names of index files: what the indices depend on is in our own key already.
        self.unique_identifiers = OrderedDict(vocab_size=self.vocab_size, eod=self.eod)


class DatasetBuilder(BlendedMegatronDatasetBuilder):
    """Megatron Core's builder, usable without a process group and with blends of many small shares.

    To save a blend's own index, Megatron Core 0.16 asks for the rank without looking whether there are ranks;
    without a process group that index, quick to make, is kept in memory.

    For a blend of n datasets and T samples, Megatron Core makes ceil(T w) samples of weight w, and 0.5 % more. It
    draws from a total of up to T + n (each share is rounded up), and its greedy draw is less than one sample ahead
    of the weight: up to w (T + n) + 1. So n + 1 samples more always suffice; without them a dataset that an epoch
    does not happen to make longer is overdrawn, which is an error.
    """

    def _build_megatron_datasets_parallel(
        self, prefixes: list[str], split: list[Any], sizes_per_dataset: list[list[int | None]]
    ) -> Any:
        """As in Megatron Core, with `sizes_per_dataset[dataset][split]` raised by the margin above."""
        margin = len(prefixes) + 1
        raised = [[size + margin if size else size for size in sizes] for sizes in sizes_per_dataset]
        return super()._build_megatron_datasets_parallel(prefixes, split, raised)

    @staticmethod
    def build_generic_dataset(
        cls: Any, is_built_on_rank: Callable[[], bool], synchronize_ranks: bool, *args: Any
    ) -> Any:
        """As in Megatron Core; the last of `args` is the dataset's config."""
        if cls is BlendedDataset and not torch.distributed.is_initialized():
            *others, config = args
            args = (*others, replace(config, path_to_cache=None))
        return BlendedMegatronDatasetBuilder.build_generic_dataset(cls, is_built_on_rank, synchronize_ranks, *args)


def build_datasets(config: Config, tokenizer: Tokenizer, reads_data: bool = True) -> Datasets:
    """The datasets of a run.

    With torch.distributed initialised every rank must call this: rank 0 builds the indices while the others
    wait. `reads_data`: whether this rank reads samples (rank 0 has to).

    Raises DataError for missing or meaningless data paths and a Megatron Core without its compiled helpers,
    IndexCacheError for a directory of indices that cannot be used, TokenFileError for a broken token file.
    """
    _require_compiled_helpers()
    training = config.training
    num_train = training.train_iters * training.global_batch_size
    num_valid = training.eval_iters * training.global_batch_size
    train = _weighted(config.data.train_data_path, "data.train_data_path")
    valid = _weighted(config.data.valid_data_path, "data.valid_data_path") if num_valid else None
    prefixes = [*train.prefixes, *(valid.prefixes if valid else ())]
    settings = {
        "seed": training.seed,
        "seq_length": config.model.seq_length,
        "num_samples": [num_train, num_valid],
        "blends": [repr(train), repr(valid)],
        "megatron_core": version("megatron-core"),
    }
    root = config.data.data_cache_path
    build = partial(_build, config, tokenizer, (train, valid), (num_train, num_valid), reads_data)
    built = build_cached(
        Path(root) if root is not None else Path(prefixes[0]).parent / "cache",
        lambda: cache_key(prefixes, settings),
        build,
    )
    for dataset, wanted, key in zip(built, (num_train, num_valid), ("train", "valid"), strict=True):
        if dataset is not None and len(dataset) < wanted:
            raise DataError(f"data.{key}_data_path gives {len(dataset)} samples; {wanted} are needed")
    return Datasets(*built, num_train_samples=num_train, num_valid_samples=num_valid)


def _build(
    config: Config,
    tokenizer: Tokenizer,
    blends: tuple[Blend, Blend | None],
    sizes: tuple[int, int],
    reads_data: bool,
    directory: Path,
) -> tuple[Any, Any]:
    """Train and validation dataset through Megatron Core's builder, indices in `directory`."""
    dataset_config = GPTDatasetConfig(
        random_seed=config.training.seed,
        sequence_length=config.model.seq_length,
        blend_per_split=[_megatron_blend(blend) for blend in (*blends, None)],
        path_to_cache=str(directory),
        tokenizer=MegatronTokenizer(tokenizer),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=config.data.eod_mask_loss,
        # Attention is causal by itself; a mask would cost [s, s] bytes a sample.
        create_attention_mask=False,
    )
    builder = DatasetBuilder(GPTDataset, [*sizes, 0], lambda: reads_data, dataset_config)
    train, valid, _ = builder.build()
    return train, valid


def _weighted(entries: list[str], key: str) -> Blend:
    """The blend of a config key; several prefixes without weights get their numbers of tokens as weights.

    Left to itself Megatron Core gives such a list one epoch and no more, whatever the run needs.
    """
    try:
        blend = parse_blend(entries)
    except BlendError as error:
        raise DataError(f"{key} = {entries}: {error.reason}; {error.use_instead}") from error
    # Read even where no weights are missing: every rank then reports a broken file, not rank 0 alone.
    indices = [read_index(prefix) for prefix in blend.prefixes]
    if blend.weights is None and len(indices) > 1:
        return replace(blend, weights=tuple(float(index.num_tokens) for index in indices))
    return blend


def _megatron_blend(blend: Blend | None) -> tuple[list[str], list[float] | None] | None:
    if blend is None:
        return None
    return list(blend.prefixes), list(blend.weights) if blend.weights is not None else None


def _require_compiled_helpers() -> None:
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"megatron-core {version('megatron-core')} has no compiled megatron.core.datasets.helpers_cpp "
            f"for Python {platform.python_version()} on {platform.machine()}: {error}. Install a wheel of "
            f"megatron-core for this platform, or compile it where megatron-core is installed "
            f"(pybind11 and a C++ compiler are needed)"
        ) from error
