"""Owns the loop of generation: samples go on, a token at a time, until each has ended.

Must not know text, or where it goes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_fp8.generate.decoder import Decoder
from megatron_fp8.generate.sampling import Sampling, next_tokens
from megatron_fp8.train.loaded_model import LoadedModel

Ending = Literal["end of document", "max_new_tokens", "positions", "stopped"]
OnToken = Callable[[int, int], None]


@dataclass(frozen=True)
class Limits:
    """When a sample ends: after `max_new_tokens` tokens, at the token `end` (None: at none), or when `stops`, given its
    new tokens, says so; of all ranks alike.
    """

    max_new_tokens: int
    end: int | None = None
    stops: Callable[[Sequence[int]], bool] | None = None


@dataclass(frozen=True)
class Continuation:
    """The tokens that follow a prompt, without the one that ended it, and why there are no more.

    `positions`: the model has none for another token.
    """

    tokens: list[int]
    ending: Ending


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    seed: int,
    on_token: OnToken | None = None,
    use_cache: bool = True,
) -> list[Continuation]:
    """Continue `prompts`, each of one token at least and of fewer than `model.num_positions`, side by side.

    Prompt i draws from random numbers of its own, made of `seed` and i. `on_token(i, token)` is told each token when
    it is known. All ranks of the model's tensor-parallel group call this alike, and all get the same.
    """
    most = model.num_positions
    wrong = [index for index, prompt in enumerate(prompts) if not 0 < len(prompt) < most]
    if wrong:
        raise ValueError(f"prompts {wrong} have no token, or {most} or more, for which the model has no positions")
    longest = min(most, max(map(len, prompts)) + limits.max_new_tokens)
    generators = [torch.Generator().manual_seed(seed + index) for index in range(len(prompts))]
    written: list[list[int]] = [[] for _ in prompts]
    endings: list[Ending | None] = [None] * len(prompts)
    if limits.max_new_tokens == 0:
        return [Continuation([], "max_new_tokens") for _ in prompts]
    with model.precision.evaluation():
        decoder = Decoder(model, len(prompts), longest, use_cache)
        going: dict[int, Sequence[int]] = dict(enumerate(prompts))
        while going:
            logits = decoder.read(going)
            tokens = next_tokens(logits, sampling, [generators[index] for index in going])
            for index, token in zip(going, tokens, strict=True):
                endings[index] = _ending(token, len(prompts[index]), len(written[index]) + 1, limits, most)
                if token == limits.end:
                    continue
                written[index].append(token)
                if endings[index] is None and limits.stops is not None and limits.stops(written[index]):
                    endings[index] = "stopped"
                if on_token is not None:
                    on_token(index, token)
            going = {index: [token] for index, token in zip(going, tokens, strict=True) if endings[index] is None}
    return [Continuation(row, ending) for row, ending in zip(written, endings, strict=True) if ending is not None]


def _ending(token: int, prompt_length: int, num_new: int, limits: Limits, most: int) -> Ending | None:
    if token == limits.end:
        return "end of document"
    if num_new >= limits.max_new_tokens:
        return "max_new_tokens"
    return "positions" if prompt_length + num_new >= most else None
