"""Measures the loss of a loaded model over whole token files, shared by all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed

from megatron_fp8.data.documents import DocumentRules, document_rules
from megatron_fp8.data.loader import BatchLoader, BatchSampler
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.data.validation import WholeFile
from megatron_fp8.evaluate.files import EvaluationFile
from megatron_fp8.generate.loaded_model import LoadedModel
from megatron_fp8.train.step import LossSum

OnWindows = Callable[[str, int, int], None]
"""Progress: name of the file, its number of windows, how many of them are done."""


@dataclass(frozen=True)
class FileLoss:
    """A model's loss on one file or several: the sum over tokens, in nats.

    `num_windows`: samples that were read. `num_bytes`: UTF-8 bytes of the tokens' text, without end-of-document tokens;
    None: unknown.
    """

    name: str
    num_windows: int
    num_tokens: int
    loss_sum: float
    num_bytes: int | None

    @property
    def loss(self) -> float:
        """Nats per token; NaN without tokens."""
        return self.loss_sum / self.num_tokens if self.num_tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp of the loss; infinity where FP64 overflows."""
        return math.exp(self.loss) if self.loss < 700 or math.isnan(self.loss) else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, which is comparable between tokenizers."""
        return self.loss_sum / (math.log(2) * self.num_bytes) if self.num_bytes else None

    @classmethod
    def total(cls, parts: Sequence[FileLoss]) -> FileLoss:
        """The sum over files."""
        num_bytes = [part.num_bytes for part in parts if part.num_bytes is not None]
        return cls(
            "total",
            sum(part.num_windows for part in parts),
            sum(part.num_tokens for part in parts),
            math.fsum(part.loss_sum for part in parts),
            sum(num_bytes) if len(num_bytes) == len(parts) else None,
        )


def measure_files(
    model: LoadedModel,
    files: Sequence[EvaluationFile],
    tokenizer: Tokenizer,
    num_windows: int | None = None,
    on_windows: OnWindows | None = None,
) -> Iterator[FileLoss]:
    """Yield the loss of each file; collective. Every rank gets the same, but only rank 0 counts bytes.

    `num_windows`: of each file, evenly spaced; None: all.
    """
    seq_length = model.config.model.seq_length
    for file in files:
        text = WholeFile(
            file.prefix,
            seq_length,
            tokenizer.eod_id,
            num_windows=num_windows,
            documents=file.documents,
            vocab_size=model.vocab_size,
        )
        documents = document_rules(model.config.data, tokenizer)
        losses = _losses(model, text, documents, partial(on_windows, file.name, len(text)) if on_windows else None)
        sums = LossSum.total(losses).sum_and_tokens if losses else torch.zeros(2, dtype=torch.float64)
        sums = sums.to(model.device.torch_device)
        torch.distributed.all_reduce(sums)
        loss_sum, num_tokens = sums.tolist()
        expected = text.num_counted
        if num_tokens != expected:
            raise RuntimeError(f"{file.prefix}: {num_tokens:g} tokens were counted instead of {expected}")
        num_bytes = num_text_bytes(text, tokenizer) if model.groups.rank == 0 else None
        yield FileLoss(file.name, len(text), expected, loss_sum, num_bytes)


def _losses(
    model: LoadedModel, text: WholeFile, documents: DocumentRules | None, on_windows: Callable[[int], None] | None
) -> list[LossSum]:
    """This rank's loss sum of each global batch."""
    groups, training = model.groups, model.config.training
    sampler = BatchSampler(training.micro_batch_size, training.global_batch_size, groups.dp.rank(), groups.dp.size())
    num_batches = -(-len(text) // training.global_batch_size)
    cuts = documents is not None and documents.reset_attention_mask
    loader = BatchLoader(
        text,
        sampler,
        model.config.model.seq_length,
        num_batches * training.global_batch_size,
        model.device.torch_device,
        tp_group=groups.tp,
        needs_data=groups.is_first_stage or groups.is_last_stage or cuts,
        num_workers=model.config.data.num_workers,
        documents=documents,
    )
    losses = []
    stepper = model.stepper()
    with loader:
        iterators = loader.iterators(len(model.stages))
        for number in range(1, num_batches + 1):
            losses.append(stepper.evaluate(iterators, model.batch_shape))
            if on_windows is not None:
                on_windows(min(number * training.global_batch_size, len(text)))
    return losses


def num_text_bytes(file: WholeFile, tokenizer: Tokenizer) -> int | None:
    """UTF-8 bytes of the documents' text, without end-of-document tokens; None unless all windows are read.

    Documents are decoded whole: a token may be part of a character.
    """
    if file.num_counted < file.num_tokens:
        return None
    total = 0
    for document in file.each_document():
        for part in np.split(document, np.flatnonzero(document == tokenizer.eod_id)):
            ids = part[part != tokenizer.eod_id].tolist()
            total += len(tokenizer.decode(ids).encode("utf-8", "surrogatepass")) if ids else 0
    return total
