"""Owns what an evaluation during training reads: which sets, which samples of each, and what each counts in the total.

Must not know how samples are drawn or what is computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fp8.config.schema import Config
from megatron_fp8.data.blend import Blend
from megatron_fp8.data.set_names import dataset_names
from megatron_fp8.data.token_file import read_index
from megatron_fp8.data.whole_file import WholeFile


@dataclass(frozen=True)
class ValidationSet:
    """Samples that every evaluation reads, from the first on.

    `name`: of its own series; None: it only counts in the total. `dataset`: None on ranks that do not read.
    `num_samples`: whole global batches. `weight`: of its loss in the total, where all sets have one; None: each of its
    tokens counts as much as any other set's.
    """

    name: str | None
    dataset: Any
    num_samples: int
    weight: float | None = None


def drawn_sets(config: Config, blend: Blend, built: Any, num_samples: int) -> tuple[ValidationSet, ...]:
    """The sets whose samples are drawn: the whole blend, or under `multiple_validation_sets` each of its files.

    `built`: the blend's dataset, or a list of the files'. `num_samples`: drawn from each set.
    """
    if not config.training.multiple_validation_sets:
        return (ValidationSet(None, built, num_samples),)
    names, weights = dataset_names(blend.prefixes), _weights(blend)
    return tuple(
        ValidationSet(name, dataset, num_samples, weight)
        for name, dataset, weight in zip(names, built, weights, strict=True)
    )


def whole_sets(
    config: Config, blend: Blend, eod_id: int, reads_data: bool, vocab_size: int | None = None
) -> tuple[ValidationSet, ...]:
    """The sets of `training.full_validation`: every file whole, the last global batch filled up with empty samples.

    Raises TokenFileError for a broken token file. Reading raises it for ids that are not below `vocab_size`.
    """
    batch = config.training.global_batch_size
    sets = []
    for name, prefix, weight in zip(dataset_names(blend.prefixes), blend.prefixes, _weights(blend), strict=True):
        documents = blend.documents(len(read_index(prefix).lengths_tokens))
        masked = config.data.eod_mask_loss
        file = WholeFile(prefix, config.model.seq_length, eod_id, masked, None, documents, vocab_size)
        named = name if config.training.multiple_validation_sets else None
        sets.append(ValidationSet(named, file if reads_data else None, -(-len(file) // batch) * batch, weight))
    return tuple(sets)


def _weights(blend: Blend) -> Sequence[float | None]:
    if blend.weights is None:
        return [None] * len(blend.prefixes)
    return [weight / sum(blend.weights) for weight in blend.weights]
