"""Attention of one dense batch in FP32: torch's fused CPU kernel where it applies, else blocks of queries.

Neither makes a tensor of all queries by all keys: a block's scores stay in cache, and the backward pass recomputes them
from the log-sum-exp of the forward pass. Grouped-query attention shares each key head among its query heads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionMask:
    """Query i attends to keys j with `i + shift - left <= j <= i + shift + right`; None: unbounded.

    `shift` is 0 for the top-left diagonal and `num_keys - num_queries` for the bottom-right one.
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    @classmethod
    def from_te(cls, causal: bool, window: tuple[int, int] | None, bottom_right: bool) -> "AttentionMask":
        """From TE's arguments: window `(left, right)`, -1: unbounded; causal bounds the right by 0."""
        left, right = window if window is not None else (-1, -1)
        if causal:
            right = 0
        return cls(None if left < 0 else left, None if right < 0 else right, bottom_right)

    def shift(self, num_queries: int, num_keys: int) -> int:
        """Key index of query 0's diagonal."""
        return num_keys - num_queries if self.bottom_right else 0

    def is_plain_causal(self, num_queries: int, num_keys: int) -> bool:
        """Whether it is exactly `j <= i`."""
        return self.left is None and self.right == 0 and self.shift(num_queries, num_keys) == 0

    def is_full(self) -> bool:
        """Whether every query attends to every key."""
        return self.left is None and self.right is None

    def key_range(self, start: int, stop: int, num_queries: int, num_keys: int) -> tuple[int, int]:
        """Half-open range, possibly empty, of keys that any query in `[start, stop)` attends to."""
        shift = self.shift(num_queries, num_keys)
        first = 0 if self.left is None else max(0, start + shift - self.left)
        last = num_keys if self.right is None else min(num_keys, stop + shift + self.right)
        return min(first, num_keys), max(min(first, num_keys), last)


_BLOCK_QUERIES = 128


@dataclass(frozen=True)
class ScoreRules:
    """How `q @ k^T` becomes probabilities: scale, mask, and dropout with the seed of its masks.

    sinks: FP32 `[h]`, for each head the score of one more key that every query attends to and that has no value.
    """

    scale: float
    mask: AttentionMask
    dropout: float = 0.0
    dropout_seed: int = 0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class _Block:
    """Queries `[start, stop)` and the keys `[first, last)` that any of them attends to."""

    start: int
    stop: int
    first: int
    last: int


def _blocks(rules: ScoreRules, num_queries: int, num_keys: int) -> Iterator[_Block]:
    for start in range(0, num_queries, _BLOCK_QUERIES):
        stop = min(num_queries, start + _BLOCK_QUERIES)
        first, last = rules.mask.key_range(start, stop, num_queries, num_keys)
        if last > first:
            yield _Block(start, stop, first, last)


def _grouped(rows: torch.Tensor, num_key_heads: int) -> torch.Tensor:
    """`[b, h, n, d]` as `[b, hk, h/hk * n, d]`: the queries that share a key head become rows of one GEMM."""
    b, _, n, d = rows.shape
    return rows.reshape(b, num_key_heads, -1, d) if n else rows.new_empty(b, num_key_heads, 0, d)


def _forbidden(block: _Block, rules: ScoreRules, num_queries: int, num_keys: int) -> torch.Tensor | None:
    """Bool `[queries, keys]` of a block, true where masked; None if nothing is."""
    mask, shift = rules.mask, rules.mask.shift(num_queries, num_keys)
    whole_left = mask.left is None or block.first >= block.stop - 1 + shift - mask.left
    whole_right = mask.right is None or block.last - 1 <= block.start + shift + mask.right
    if whole_left and whole_right:
        return None
    queries = torch.arange(block.start, block.stop).unsqueeze(1) + shift
    keys = torch.arange(block.first, block.last).unsqueeze(0)
    forbidden = torch.zeros(block.stop - block.start, block.last - block.first, dtype=torch.bool)
    if mask.left is not None:
        forbidden |= keys < queries - mask.left
    if mask.right is not None:
        forbidden |= keys > queries + mask.right
    return forbidden


def _scores(q: torch.Tensor, k: torch.Tensor, block: _Block, rules: ScoreRules) -> tuple[torch.Tensor, torch.Tensor]:
    """Masked scores `[b, hk, g * n, keys]` of a block, and its queries `[b, hk, g * n, d]`."""
    num_key_heads = k.shape[1]
    queries = _grouped(q[:, :, block.start : block.stop], num_key_heads)
    scores = torch.matmul(queries, k[:, :, block.first : block.last].transpose(2, 3)).mul_(rules.scale)
    forbidden = _forbidden(block, rules, q.shape[2], k.shape[2])
    if forbidden is not None:
        by_query = scores.view(*scores.shape[:2], -1, block.stop - block.start, scores.shape[3])
        by_query.masked_fill_(forbidden, -math.inf)
    return scores, queries


def _keep_factors(shape: torch.Size, rules: ScoreRules, generator: torch.Generator) -> torch.Tensor:
    """0 for dropped probabilities, `1 / (1 - dropout)` for kept ones."""
    keep = torch.empty(shape).bernoulli_(1.0 - rules.dropout, generator=generator)
    return keep.div_(1.0 - rules.dropout) if rules.dropout < 1.0 else keep


def _generator(rules: ScoreRules) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(rules.dropout_seed)


def _blocks_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: ScoreRules
) -> tuple[torch.Tensor, torch.Tensor]:
    b, h, num_queries, _ = q.shape
    out = q.new_zeros(b, h, num_queries, v.shape[3])
    lse = q.new_full((b, h, num_queries), -math.inf)
    generator = _generator(rules)
    for block in _blocks(rules, num_queries, k.shape[2]):
        rows = slice(block.start, block.stop)
        scores, _ = _scores(q, k, block, rules)
        block_lse = torch.logsumexp(scores, dim=-1, keepdim=True)
        lse[:, :, rows] = block_lse.view(b, h, -1)
        probabilities = scores.sub_(_finite(block_lse)).exp_()
        if rules.dropout > 0.0:
            probabilities.mul_(_keep_factors(probabilities.shape, rules, generator))
        block_out = torch.matmul(probabilities, v[:, :, block.first : block.last])
        out[:, :, rows] = block_out.view(b, h, -1, v.shape[3])
    return out, lse


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """-inf, of a query that attends to nothing, as 0: its probabilities become exp(-inf) = 0 instead of NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _blocks_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rules: ScoreRules,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, h, num_queries, d = q.shape
    num_key_heads = k.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    generator = _generator(rules)
    for block in _blocks(rules, num_queries, k.shape[2]):
        rows, keys = slice(block.start, block.stop), slice(block.first, block.last)
        scores, queries = _scores(q, k, block, rules)
        probabilities = scores.sub_(_finite(_grouped(lse[:, :, rows].unsqueeze(-1), num_key_heads))).exp_()
        block_grad = _grouped(grad[:, :, rows], num_key_heads)
        block_out = _grouped(out[:, :, rows], num_key_heads)
        d_probabilities = torch.matmul(block_grad, v[:, :, keys].transpose(2, 3))
        if rules.dropout > 0.0:
            keep = _keep_factors(probabilities.shape, rules, generator)
            dv[:, :, keys] += torch.matmul((probabilities * keep).transpose(2, 3), block_grad)
            d_probabilities.mul_(keep)
        else:
            dv[:, :, keys] += torch.matmul(probabilities.transpose(2, 3), block_grad)
        # rowsum(P * dP) equals rowsum(dO * O), dropout included: no second pass over the block.
        row_sums = (block_grad * block_out).sum(dim=-1, keepdim=True)
        d_scores = d_probabilities.sub_(row_sums).mul_(probabilities).mul_(rules.scale)
        dq[:, :, rows] = torch.matmul(d_scores, k[:, :, keys]).view(b, h, -1, d)
        dk[:, :, keys] += torch.matmul(d_scores.transpose(2, 3), queries)
    return dq, dk, dv


_aten = torch.ops.aten


def _is_fused_in_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: ScoreRules) -> bool:
    mask_is_plain = rules.mask.is_full() or rules.mask.is_plain_causal(q.shape[2], k.shape[2])
    return rules.dropout == 0.0 and mask_is_plain and q.shape[3] == v.shape[3] and min(q.shape[2], k.shape[2]) > 0


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: ScoreRules) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[b, h, sq, dv]` and log-sum-exp of scaled scores `[b, h, sq]`.

    q: `[b, h, sq, d]`; k: `[b, hk, sk, d]`; v: `[b, hk, sk, dv]`. A query that attends nothing gives 0, and -inf or
    the score of its head's sink.
    """
    if _is_fused_in_torch(q, k, v, rules):
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, not rules.mask.is_full(), scale=rules.scale
        )
    else:
        out, lse = _blocks_forward(q, k, v, rules)
    if rules.sinks is None:
        return out, lse
    total = torch.logaddexp(lse, rules.sinks.view(1, -1, 1))
    return out.mul_((lse - _finite(total)).exp_().unsqueeze(-1)), total


def sink_gradient(grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Gradient `[h]` of the sinks' scores. A sink has no value, so that its probability's gradient is 0.

    grad, out: `[b, h, sq, dv]`; lse: that of `forward` `[b, h, sq]`.
    """
    row_sums = (grad * out).sum(dim=-1)
    return (sinks.view(1, -1, 1) - _finite(lse)).exp_().mul_(row_sums).sum(dim=(0, 2)).neg_()


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rules: ScoreRules,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `forward` for q, k and v. grad, out: `[b, h, sq, dv]`; lse: `[b, h, sq]`.

    Sinks need no work of their own here: lse has them, and a sink's probability has no gradient.
    """
    if not _is_fused_in_torch(q, k, v, rules):
        return _blocks_backward(grad, q, k, v, out, lse, rules)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, not rules.mask.is_full(), scale=rules.scale
    )
    return dq, dk, dv
