"""Generates tokens: forward passes with a key/value cache or without, sampling, the loop until each sample has ended.

The cache is Transformer Engine's `InferenceParams`; with it each pass reads the new tokens only. Sampling is that of
Hugging Face's transformers, with whose processors tests compare it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core import tensor_parallel
from torch import Tensor
from transformer_engine.pytorch.attention import InferenceParams

from megatron_fp8.config.layout import round_up
from megatron_fp8.config.rules_precision_shapes import fp8_token_multiple
from megatron_fp8.generate.loaded_model import LoadedModel

Ending = Literal["end of document", "max_new_tokens", "positions", "stopped"]
OnToken = Callable[[int, int], None]
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


@dataclass(frozen=True)
class Limits:
    """When a sample ends: after `max_new_tokens` tokens, at the token `end` (None: at none), or when `stops` returns
    True for its new tokens, on all ranks alike.
    """

    max_new_tokens: int
    end: int | None = None
    stops: Callable[[Sequence[int]], bool] | None = None


@dataclass(frozen=True)
class Continuation:
    """The tokens that follow a prompt, without the one that ended it, and what ended it.

    `positions`: the model has no position for another token.
    """

    tokens: list[int]
    ending: Ending


class Decoder:
    """Reads a batch of samples token by token; a sample has at most `max_length` tokens.

    The model has one pipeline stage; every rank of its tensor-parallel group makes the same calls, within the
    precision manager's `evaluation`.
    """

    def __init__(self, model: LoadedModel, num_samples: int, max_length: int, use_cache: bool = True) -> None:
        if model.groups.pp.size() > 1:
            raise ValueError(f"generation needs one pipeline stage, but there are {model.groups.pp.size()}")
        (self._stage,) = model.stages
        self._model = model
        precision = model.config.precision
        self._multiple = fp8_token_multiple(precision.fp8_recipe) if precision.mode == "fp8" else 1
        self._read: dict[int, list[int]] = {sample: [] for sample in range(num_samples)}
        # Padding samples: FP8 needs a multiple of tokens, and a pass has one of each sample.
        self._fillers: list[int] = []
        self._num_fillers_ever = 0
        self._num_samples = num_samples
        self._cache = self._make_cache(max_length) if use_cache else None

    def read(self, tokens: Mapping[int, Sequence[int]]) -> Tensor:
        """Read the samples' next tokens; returns the logits `[len(tokens), vocab]` of the tokens after them.

        The first call is for all samples, each later one for some of those of the call before, one token each. FP32,
        on the CPU, the same on every rank.
        """
        first = not any(self._read.values())
        self._read = {sample: [*self._read[sample], *new] for sample, new in tokens.items()}
        if self._cache is None:
            return self._run(list(self._read.values()), [0] * len(tokens))
        rows = {sample: list(new) for sample, new in tokens.items()}
        if not first:
            rows |= {filler: [0] for filler in self._padding(len(rows))}
        self._cache.pre_step(OrderedDict((sample, len(row)) for sample, row in rows.items()))
        if list(self._cache.sequences)[: len(tokens)] != list(tokens):
            raise RuntimeError(f"the cache reordered its samples: {list(self._cache.sequences)}")
        starts = [len(self._read[sample]) - len(row) if sample in self._read else 0 for sample, row in rows.items()]
        return self._run(list(rows.values()), starts)[: len(tokens)]

    def _padding(self, num_samples: int) -> list[int]:
        """The padding samples beside `num_samples`; existing ones are reused."""
        needed = round_up(num_samples, self._multiple) - num_samples
        while len(self._fillers) < needed:
            self._fillers.append(self._num_samples + self._num_fillers_ever)
            self._num_fillers_ever += 1
        del self._fillers[needed:]
        return self._fillers

    def _run(self, rows: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """Logits after each row of tokens, whose first token is at position `starts`; `[rows, vocab]`."""
        device, vocab_size = self._model.device.torch_device, self._model.vocab_size
        longest = max(map(len, rows))
        if len(rows) * longest % self._multiple:
            longest = round_up(longest, self._multiple)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.tensor(row)
        # Padding may lie beyond the last position.
        positions = (torch.tensor(starts).unsqueeze(1) + torch.arange(longest)).clamp(
            max=self._model.layout.max_position_embeddings - 1
        )
        last = torch.tensor([len(row) - 1 for row in rows])
        logits = self._stage.next_token_logits(tokens.to(device), positions.to(device), last.to(device), self._cache)
        whole: Tensor = tensor_parallel.gather_from_tensor_model_parallel_region(logits, group=self._model.groups.tp)
        return whole[:, :vocab_size].float().cpu()

    def _make_cache(self, max_length: int) -> InferenceParams:
        layout = self._model.layout
        return InferenceParams(
            max_batch_size=round_up(self._num_samples, self._multiple),
            max_sequence_length=max_length,
            num_heads_kv=layout.query_groups_per_rank,
            head_dim_k=layout.kv_channels,
            dtype=self._model.precision.params_dtype,
            qkv_format="sbhd",
        )


@contextmanager
def _quantizing_weights_once(model: LoadedModel) -> Iterator[None]:
    """FP8 weights are quantized in the first forward pass inside, and kept for the later ones."""
    stage = model.stages[0]
    before, stage.is_first_microbatch = stage.is_first_microbatch, True
    try:
        yield
    finally:
        stage.is_first_microbatch = before


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    seed: int,
    on_token: OnToken | None = None,
    use_cache: bool = True,
) -> list[Continuation]:
    """Continue `prompts`, each of at least one and fewer than `model.num_positions` tokens, as a batch.

    Prompt i has its own generator, seeded with `seed` + i. `on_token(i, token)` is called with each new token. Every
    rank of the model's tensor-parallel group makes the same call and gets the same result.
    """
    most = model.num_positions
    wrong = [index for index, prompt in enumerate(prompts) if not 0 < len(prompt) < most]
    if wrong:
        raise ValueError(f"prompts {wrong} have no tokens, or {most} or more, for which the model has no positions")
    longest = min(most, max(map(len, prompts)) + limits.max_new_tokens)
    generators = [torch.Generator().manual_seed(seed + index) for index in range(len(prompts))]
    written: list[list[int]] = [[] for _ in prompts]
    endings: list[Ending | None] = [None] * len(prompts)
    if limits.max_new_tokens == 0:
        return [Continuation([], "max_new_tokens") for _ in prompts]
    with model.precision.evaluation(), _quantizing_weights_once(model):
        decoder = Decoder(model, len(prompts), longest, use_cache)
        active: dict[int, Sequence[int]] = dict(enumerate(prompts))
        while active:
            logits = decoder.read(active)
            tokens = next_tokens(logits, sampling, [generators[index] for index in active])
            for index, token in zip(active, tokens, strict=True):
                endings[index] = _ending(token, len(prompts[index]), len(written[index]) + 1, limits, most)
                if token == limits.end:
                    continue
                written[index].append(token)
                if endings[index] is None and limits.stops is not None and limits.stops(written[index]):
                    endings[index] = "stopped"
                if on_token is not None:
                    on_token(index, token)
            active = {index: [token] for index, token in zip(active, tokens, strict=True) if endings[index] is None}
    return [Continuation(row, ending) for row, ending in zip(written, endings, strict=True) if ending is not None]


def _ending(token: int, prompt_length: int, num_new: int, limits: Limits, most: int) -> Ending | None:
    if token == limits.end:
        return "end of document"
    if num_new >= limits.max_new_tokens:
        return "max_new_tokens"
    return "positions" if prompt_length + num_new >= most else None
