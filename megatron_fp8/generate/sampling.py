"""Samples the next token from logits: temperature, top-k, top-p, in that order, or greedily.

As in Hugging Face's transformers, whose processors the tests compare with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Below it logits overflow FP32 when divided, and the most likely token has all the probability anyway.
_MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    `greedy`: the most likely one; the rest is ignored. `temperature`: divides logits; 0: greedy. `top_k`: keep that
    many most likely tokens; 0: all. `top_p`: keep the smallest set of most likely tokens whose probabilities sum to at
    least this; 1: all.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def next_tokens(logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> list[int]:
    """A token for each row of FP32 `logits` `[b, vocab]` on the CPU; row i draws from `generators[i]` alone."""
    if sampling.greedy or sampling.temperature < _MIN_TEMPERATURE:
        return [int(token) for token in logits.argmax(dim=-1)]
    chances = filtered(logits, sampling).softmax(dim=-1)
    return [
        int(torch.multinomial(row, 1, generator=generator)) for row, generator in zip(chances, generators, strict=True)
    ]


def filtered(logits: Tensor, sampling: Sampling) -> Tensor:
    """`logits` `[b, vocab]` over the temperature, minus infinity for tokens that cannot be drawn."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        # A token goes when it and all less likely ones have at most 1 - top_p.
        goes = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - sampling.top_p
        goes[..., -1] = False
        logits = logits.masked_fill(goes.scatter(-1, order, goes), -torch.inf)
    return logits
