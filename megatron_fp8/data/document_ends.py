"""Owns the check that documents of a token file end as keys about documents expect: without ends these do nothing.

Imports no torch, so that it runs before processes start.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import DataConfig
from megatron_fp8.data.token_file import bin_path, read_index

_MOST_DOCUMENTS = 1000
_KEYS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask")


def check_document_ends(data: DataConfig, eod_id: int, prefixes: Iterable[str]) -> list[Problem]:
    """A problem for each whole file of `prefixes` in which no document ends with `eod_id`, if a key goes by such ends.

    Of many documents 1000, evenly spaced, are looked at.
    """
    keys = [f"data.{key}" for key in _KEYS if getattr(data, key)]
    if not keys:
        return []
    problems = []
    for prefix in dict.fromkeys(prefixes):
        num_documents = _documents_without_end(prefix, eod_id)
        if num_documents is not None:
            reason = (
                f"of {num_documents} documents of {prefix} none ends with the tokenizer's end-of-document token, id "
                f"{eod_id}, so nothing says where one ends"
            )
            use = f"the file made with tools/preprocess_data.py --append-eod; or {' '.join(f'{k}=false' for k in keys)}"
            problems.append(Problem(keys[-1], True, reason, use))
    return problems


def _documents_without_end(prefix: str, eod_id: int) -> int | None:
    """How many documents were looked at if none of them has an end; None if one has, or there is none."""
    index = read_index(prefix)
    lengths = index.lengths_tokens
    with_tokens = np.flatnonzero(lengths)
    if len(with_tokens) == 0:
        return None
    count = min(len(with_tokens), _MOST_DOCUMENTS)
    looked_at = with_tokens[np.linspace(0, len(with_tokens) - 1, count).astype(np.int64)]
    tokens = np.memmap(bin_path(prefix), dtype=index.dtype, mode="r")
    last = index.offsets_bytes[looked_at] // index.dtype.itemsize + lengths[looked_at] - 1
    return None if (tokens[last] == eod_id).any() else count
