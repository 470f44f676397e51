"""The key/value cache of `transformer_engine_torch`: where new tokens are put.

Must not know attention, or who decides which sequence has which place.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.enums import NVTE_QKV_Format

__all__ = ["copy_to_kv_cache"]


def copy_to_kv_cache(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_new_lens: Tensor,
    cu_cached_lens: Tensor,
    qkv_format: Any,
    b: int,
    max_ctx_len: int,  # noqa: ARG001 - the length that bshd and sbhd tensors have
    max_seq_len: int,
    max_pages_per_seq: int,
    is_non_paged: bool,
) -> None:
    """Put each sequence's new tokens behind those that the caches hold of it.

    new_k, new_v: `[b, s, h, d]`, `[s, b, h, d]` or `[t, h, d]` by `qkv_format`; of each sequence its first tokens are
    new, as many as `cu_new_lens`, int32 cumulative `[b + 1]` or longer, says. `cu_cached_lens`: the same with what is
    there already. k_cache, v_cache: `[pages, page size, h, d]`, written in place; a page holds
    `max_seq_len / max_pages_per_seq` tokens. page_table: int32, `max_pages_per_seq` pages of each sequence. With
    `is_non_paged` sequence i has page i, and before that takes over what is on page `page_table[i]`.
    """
    new_lens, lens = cu_new_lens.diff()[:b].tolist(), cu_cached_lens.diff()[:b].tolist()
    pages = page_table.view(-1, max_pages_per_seq)[:b].long()
    if is_non_paged:
        _move_up(pages[:, 0].tolist(), [old - new for old, new in zip(lens, new_lens, strict=True)], k_cache, v_cache)
        pages = torch.arange(b).unsqueeze(1)
    page_size = max_seq_len // max_pages_per_seq
    starts = cu_new_lens.tolist()
    for index, (new, length) in enumerate(zip(new_lens, lens, strict=True)):
        places = torch.arange(length - new, length)
        at = (pages[index][places // page_size], places % page_size)
        for cache, tokens in ((k_cache, new_k), (v_cache, new_v)):
            cache[at] = _tokens_of(tokens, qkv_format, index, starts[index], new)


def _move_up(sources: list[int], lengths: list[int], *caches: Tensor) -> None:
    """Close the gaps of sequences that have ended: page i takes the tokens of page `sources[i]`, not before it."""
    for target, (source, length) in enumerate(zip(sources, lengths, strict=True)):
        if source != target:
            for cache in caches:
                cache[target, :length] = cache[source, :length].clone()


def _tokens_of(tokens: Tensor, qkv_format: Any, index: int, start: int, number: int) -> Tensor:
    kind = NVTE_QKV_Format(int(qkv_format))
    if kind == NVTE_QKV_Format.NVTE_THD:
        return tokens[start : start + number]
    if kind == NVTE_QKV_Format.NVTE_SBHD:
        return tokens[:number, index]
    if kind == NVTE_QKV_Format.NVTE_BSHD:
        return tokens[index, :number]
    raise NotImplementedError(f"copy_to_kv_cache for {kind.name} has no CPU stand-in")
