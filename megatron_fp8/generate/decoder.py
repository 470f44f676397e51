"""Owns the forward passes of generation: tokens in, the next token's logits out, with a key/value cache or without.

The cache is Transformer Engine's `InferenceParams`. With it each pass reads the new tokens only. Must not know how
tokens are chosen, or text.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from megatron.core import tensor_parallel
from torch import Tensor
from transformer_engine.pytorch.attention import InferenceParams

from megatron_fp8.config.rules_precision_shapes import fp8_token_multiple
from megatron_fp8.train.loaded_model import LoadedModel


class Decoder:
    """Reads some samples side by side, token by token. `max_length`: tokens that a sample has at most.

    The model has one stage and every rank of its tensor-parallel group makes the same calls, within the precision
    manager's `evaluation`.
    """

    def __init__(self, model: LoadedModel, num_samples: int, max_length: int, use_cache: bool = True) -> None:
        if model.groups.pp.size() > 1:
            raise ValueError(f"a decoder needs the whole model on a stage, and there are {model.groups.pp.size()}")
        (self._stage,) = model.stages
        self._model = model
        precision = model.config.precision
        self._multiple = fp8_token_multiple(precision.fp8_recipe) if precision.mode == "fp8" else 1
        self._read: dict[int, list[int]] = {sample: [] for sample in range(num_samples)}
        # Samples that only fill up: FP8 wants a multiple of tokens, and a pass has one of each sample.
        self._fillers: list[int] = []
        self._num_fillers_ever = 0
        self._num_samples = num_samples
        self._cache = self._make_cache(max_length) if use_cache else None
        # From here on FP8 weights are quantized once.
        self._stage.is_first_microbatch = True

    def read(self, tokens: Mapping[int, Sequence[int]]) -> Tensor:
        """Read some samples' next tokens; returns the logits `[len(tokens), vocab]` of what comes next.

        The first call is for all samples, each later one for some of those of the call before it, and one token each.
        FP32, on the CPU, the same on every rank.
        """
        first = not any(self._read.values())
        self._read = {sample: [*self._read[sample], *new] for sample, new in tokens.items()}
        if self._cache is None:
            return self._run(list(self._read.values()), [0] * len(tokens))
        rows = {sample: list(new) for sample, new in tokens.items()}
        if not first:
            rows |= {filler: [0] for filler in self._fill_up(len(rows))}
        self._cache.pre_step(OrderedDict((sample, len(row)) for sample, row in rows.items()))
        if list(self._cache.sequences)[: len(tokens)] != list(tokens):
            raise RuntimeError(f"the cache has its samples in another order: {list(self._cache.sequences)}")
        starts = [len(self._read[sample]) - len(row) if sample in self._read else 0 for sample, row in rows.items()]
        return self._run(list(rows.values()), starts)[: len(tokens)]

    def _fill_up(self, num_samples: int) -> list[int]:
        """The fillers beside so many samples; those that there are already stay as far as they are needed."""
        needed = _round_up(num_samples, self._multiple) - num_samples
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
            longest = _round_up(longest, self._multiple)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.tensor(row)
        # What fills up may lie beyond the last position that there is.
        positions = (torch.tensor(starts).unsqueeze(1) + torch.arange(longest)).clamp(
            max=self._model.layout.max_position_embeddings - 1
        )
        last = torch.tensor([len(row) - 1 for row in rows])
        logits = self._stage.next_token_logits(tokens.to(device), positions.to(device), last.to(device), self._cache)
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(logits, group=self._model.groups.tp)
        return whole[:, :vocab_size].float().cpu()

    def _make_cache(self, max_length: int) -> InferenceParams:
        layout = self._model.layout
        return InferenceParams(
            max_batch_size=_round_up(self._num_samples, self._multiple),
            max_sequence_length=max_length,
            num_heads_kv=layout.query_groups_per_rank,
            head_dim_k=layout.kv_channels,
            dtype=self._model.precision.params_dtype,
            qkv_format="sbhd",
        )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
