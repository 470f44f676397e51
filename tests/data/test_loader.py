"""Every rank gets its part of the same global batches, reads no more than it must, and is told of failures."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor

from megatron_fp8.data.documents import DocumentRules
from megatron_fp8.data.loader import BatchLoader, BatchSampler, MicroBatch
from tests.ranks import run_on_ranks

SEQ_LENGTH = 4
GPU = torch.device("cuda")


class NumberedSamples:
    """Sample i: tokens 10 i, 10 i + 1, ...; records reads, fails at `fails_at`, sets `was_read` at `awaited`."""

    def __init__(self, fails_at: int | None = None, awaited: int | None = None) -> None:
        self.read: list[int] = []
        self.fails_at = fails_at
        self.awaited = awaited
        self.was_read = threading.Event()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self.fails_at:
            raise OSError(f"disk gone at sample {index}")
        self.read.append(index)
        if index == self.awaited:
            self.was_read.set()
        text = torch.arange(SEQ_LENGTH + 1) + 10 * index
        loss_mask = torch.ones(SEQ_LENGTH)
        loss_mask[index % SEQ_LENGTH] = 0
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": loss_mask,
            "position_ids": torch.arange(SEQ_LENGTH),
        }


def make_loader(dataset: NumberedSamples | None, sampler: BatchSampler, **changes: object) -> BatchLoader:
    values = {"seq_length": SEQ_LENGTH, "num_samples": 48, "device": GPU} | changes
    return BatchLoader(dataset, sampler, **values)


def samples_of(batch: MicroBatch) -> list[int]:
    """Numbers of the samples, after a check that every field is that sample's."""
    numbers = [int(row[0]) // 10 for row in batch.tokens]
    for row, number in enumerate(numbers):
        sample = NumberedSamples()[number]
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            field = getattr(batch, name)
            assert torch.equal(field[row].cpu(), sample[name])
            assert field.dtype == sample[name].dtype
            assert field.is_contiguous()
    return numbers


def drain(iterator: Iterator[MicroBatch]) -> list[list[int]]:
    return [samples_of(batch) for batch in iterator]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 1), (1, 8), (2, 2), (4, 1), (4, 2)])
def test_every_layout_sees_the_same_global_batches(dp_size: int, micro_batch_size: int, num_workers: int) -> None:
    global_batches: list[set[int]] = [set() for _ in range(5)]
    for rank in range(dp_size):
        sampler = BatchSampler(micro_batch_size, 8, rank, dp_size)
        with make_loader(NumberedSamples(), sampler, consumed_samples=8, num_workers=num_workers) as loader:
            (iterator,) = loader.iterators()
            for step, batch in enumerate(global_batches):
                for _ in range(sampler.num_micro_batches):
                    batch.update(samples_of(next(iterator)))
                assert loader.consumed_samples == 8 * (step + 2)
            assert next(iterator, None) is None
    assert global_batches == [set(range(start, start + 8)) for start in range(8, 48, 8)]


def test_model_chunks_see_the_same_micro_batches_read_once() -> None:
    dataset = NumberedSamples()
    with make_loader(dataset, BatchSampler(2, 8), num_samples=16) as loader:
        first, second = loader.iterators(num_chunks=2)
        # The order in which an interleaved schedule asks: chunks alternate, the first one ahead.
        seen: tuple[list[list[int]], list[list[int]]] = ([], [])
        for _ in range(4):
            seen[0].extend(samples_of(batch) for batch in islice(first, 2))
            seen[1].extend(samples_of(batch) for batch in islice(second, 2))
            assert loader.consumed_samples == len(seen[1]) // 4 * 8
        assert seen[0] == seen[1] == [[i, i + 1] for i in range(0, 16, 2)]
    assert dataset.read == list(range(16))


def test_prefetched_batches_are_not_consumed() -> None:
    dataset = NumberedSamples(awaited=8)
    with make_loader(dataset, BatchSampler(1, 4), num_samples=40, consumed_samples=4) as loader:
        (iterator,) = loader.iterators()
        for _ in range(3):
            next(iterator)
        assert dataset.was_read.wait(timeout=60)
        assert loader.consumed_samples == 4
        next(iterator)
        assert loader.consumed_samples == 8


def test_a_resume_continues_with_the_next_sample_in_another_layout() -> None:
    with make_loader(NumberedSamples(), BatchSampler(2, 8)) as loader:
        before = [samples_of(batch) for batch in islice(loader.iterators()[0], 8)]
        consumed_samples = loader.consumed_samples
    with make_loader(NumberedSamples(), BatchSampler(4, 8), consumed_samples=consumed_samples) as loader:
        after = drain(loader.iterators()[0])
    assert [number for batch in before + after for number in batch] == list(range(48))


def test_ranks_in_the_middle_of_the_pipeline_read_nothing() -> None:
    with make_loader(None, BatchSampler(2, 8), needs_data=False, num_samples=16) as loader:
        batches = list(loader.iterators()[0])
        assert loader.consumed_samples == 16
    assert len(batches) == 8
    assert batches[0].tokens.shape == batches[0].loss_mask.shape == (2, 0)


def test_a_reader_without_a_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="has no dataset"):
        make_loader(None, BatchSampler(2, 8))


def test_iterators_may_be_asked_for_once() -> None:
    with make_loader(NumberedSamples(), BatchSampler(2, 8)) as loader:
        loader.iterators()
        with pytest.raises(RuntimeError, match="only once"):
            loader.iterators()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_exception_in_reading_reaches_the_loop_with_its_traceback(num_workers: int) -> None:
    dataset = NumberedSamples(fails_at=9)
    with make_loader(dataset, BatchSampler(2, 8), num_workers=num_workers) as loader:
        (iterator,) = loader.iterators()
        assert [samples_of(batch) for batch in islice(iterator, 4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        with pytest.raises(OSError, match="disk gone at sample 9") as caught:
            next(iterator)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert (frames[-1].name, frames[-1].filename) == ("__getitem__", __file__)


def read_in_two_by_two() -> tuple[list[list[int]], list[int]]:
    """TP2 x DP2 in Megatron's order (tensor-parallel ranks are neighbours): batches seen, samples read."""
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    dp_rank, tp_rank = divmod(torch.distributed.get_rank(), 2)
    dataset = NumberedSamples() if tp_rank == 0 else None
    sampler = BatchSampler(2, 8, dp_rank, dp_size=2)
    with make_loader(dataset, sampler, tp_group=groups[dp_rank], num_samples=16) as loader:
        return drain(loader.iterators()[0]), dataset.read if dataset else []


def test_one_rank_reads_for_its_tensor_parallel_group() -> None:
    (seen0, read0), (seen1, read1), (seen2, read2), (seen3, read3) = run_on_ranks(4, read_in_two_by_two)
    assert seen0 == seen1 == [[0, 1], [4, 5], [8, 9], [12, 13]]
    assert seen2 == seen3 == [[2, 3], [6, 7], [10, 11], [14, 15]]
    assert read0 == [0, 1, 4, 5, 8, 9, 12, 13]
    assert read2 == [2, 3, 6, 7, 10, 11, 14, 15]
    assert read1 == read3 == []


EOD = 3


class EndedSamples(NumberedSamples):
    """Sample i has an end of a document at token i % 5, where it has such a token."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = dict(super().__getitem__(index))
        tokens = sample["tokens"] + 4
        tokens[torch.arange(SEQ_LENGTH) == index % 5] = EOD
        return {**sample, "tokens": tokens}


@pytest.mark.parametrize(("positions", "attention"), [(True, False), (False, True), (True, True)])
def test_positions_and_attention_restart_as_configured(positions: bool, attention: bool) -> None:
    rules = DocumentRules(EOD, reset_position_ids=positions, reset_attention_mask=attention)
    with make_loader(EndedSamples(), BatchSampler(2, 4), num_samples=8, documents=rules) as loader:
        batches = list(loader.iterators()[0])
    restarted = [[0, 0, 1, 2], [0, 1, 0, 1], [0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 0, 1]]
    expected = restarted if positions else [[0, 1, 2, 3]] * 7
    assert torch.cat([batch.position_ids for batch in batches]).tolist()[:7] == expected
    # Of two samples of four tokens, one after the other; the last documents are empty.
    lengths = [[0, 1, 4, 6, 8], [0, 3, 4, 8, 8], [0, 4, 5, 8, 8], [0, 2, 4, 7, 8]]
    for batch, each in zip(batches, lengths, strict=True):
        if attention:
            assert batch.cu_seqlens is not None
            assert batch.cu_seqlens.dtype == torch.int32
            assert batch.cu_seqlens.tolist() == each
        else:
            assert batch.cu_seqlens is None


def test_without_document_rules_there_are_no_cumulative_lengths() -> None:
    with make_loader(EndedSamples(), BatchSampler(2, 4), num_samples=4) as loader:
        for batch in loader.iterators()[0]:
            assert batch.cu_seqlens is None
            assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2


def cut_in_two() -> list[list[int]]:
    """Documents that the ranks of a tensor-parallel pair see, of which one reads."""
    rules = DocumentRules(EOD, reset_position_ids=False, reset_attention_mask=True)
    dataset = EndedSamples() if torch.distributed.get_rank() == 0 else None
    group = torch.distributed.new_group([0, 1])
    with make_loader(dataset, BatchSampler(2, 4), tp_group=group, num_samples=8, documents=rules) as loader:
        return [batch.cu_seqlens.tolist() for batch in loader.iterators()[0] if batch.cu_seqlens is not None]


def test_ranks_of_a_tensor_parallel_group_see_the_same_documents() -> None:
    first, second = run_on_ranks(2, cut_in_two)
    assert first == second == [[0, 1, 4, 6, 8], [0, 3, 4, 8, 8], [0, 4, 5, 8, 8], [0, 2, 4, 7, 8]]
