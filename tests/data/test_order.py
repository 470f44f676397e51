"""The order of samples: Megatron Core's within an epoch, and for ever the same however long a run is."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_file_reference import decode_token_file

from megatron_fp8.data.order import Order, blend_order, file_order, samples_in
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.device import prepare
from megatron_fp8.prepare.token_file_writer import TokenFileWriter

SEQ_LENGTH = 16
SEED = 1234


def lengths_of(number: int, seed: int = 0) -> np.ndarray:
    """Lengths of documents, empty ones and one much longer than a sample among them."""
    lengths = np.random.default_rng(seed).integers(0, 40, size=number).astype(np.int32)
    lengths[number // 2] = 150
    return lengths


def cut_by_hand(order: Order, lengths: np.ndarray) -> list[list[tuple[int, int]]]:
    """Every sample in the order of the run, as (document, token of it): the stream is laid out and cut."""
    stream = [(int(document), token) for document in order.document_index for token in range(lengths[document])]
    return [
        stream[cut * SEQ_LENGTH : (cut + 1) * SEQ_LENGTH + 1] for cut in (int(number) for number in order.shuffle_index)
    ]


@pytest.mark.parametrize("num_documents", [3, 30])
def test_the_index_is_the_stream_cut_in_pieces(num_documents: int) -> None:
    lengths = lengths_of(num_documents)
    order = file_order(lengths, range(num_documents), SEQ_LENGTH, SEED, 3 * samples_in(int(lengths.sum()), SEQ_LENGTH))
    for cut, sample in zip(order.shuffle_index, cut_by_hand(order, lengths), strict=True):
        for (place, token), wanted in zip(order.sample_index[cut : cut + 2], (sample[0], sample[-1]), strict=True):
            assert (int(order.document_index[place]), int(token)) == wanted


def test_an_epoch_has_every_document_once_and_its_samples_before_the_next_one() -> None:
    lengths = lengths_of(20)
    per_epoch = int(lengths.sum())
    order = file_order(lengths, range(20), SEQ_LENGTH, SEED, 4 * per_epoch // SEQ_LENGTH)
    epochs = order.document_index.reshape(-1, 20)
    assert len(epochs) >= 4
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    for number in range(len(epochs)):
        begin, end = samples_in(per_epoch, SEQ_LENGTH, number), samples_in(per_epoch, SEQ_LENGTH, number + 1)
        assert sorted(order.shuffle_index[begin:end]) == list(range(begin, end))
        assert end * SEQ_LENGTH < per_epoch * (number + 1)


@pytest.mark.parametrize("num_samples", [1, 29, 30, 31, 100])
def test_a_longer_run_begins_as_a_shorter_one(num_samples: int) -> None:
    lengths = lengths_of(25)
    short = cut_by_hand(file_order(lengths, range(25), SEQ_LENGTH, SEED, num_samples), lengths)
    long = cut_by_hand(file_order(lengths, range(25), SEQ_LENGTH, SEED, 333), lengths)
    assert len(short) >= num_samples
    assert short == long[: len(short)]


def test_only_documents_of_the_share_are_read() -> None:
    order = file_order(lengths_of(25), range(5, 9), SEQ_LENGTH, SEED, 50)
    assert set(order.document_index) == {5, 6, 7, 8}


def test_a_file_shorter_than_a_sample_still_gives_samples() -> None:
    lengths = np.array([5], dtype=np.int32)
    order = file_order(lengths, range(1), SEQ_LENGTH, SEED, 4)
    assert [len(sample) for sample in cut_by_hand(order, lengths)[:4]] == [SEQ_LENGTH + 1] * 4


def test_no_tokens_make_no_samples() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        file_order(np.zeros(3, dtype=np.int32), range(3), SEQ_LENGTH, SEED, 1)
    assert samples_in(0, SEQ_LENGTH) == 0


@pytest.mark.parametrize("weights", [(1.0,), (0.7, 0.3), (1.0, 1e-9), tuple([1e-7] * 50 + [1.0]), (3, 3, 3)])
def test_a_blend_follows_its_weights_and_does_not_depend_on_its_length(weights: tuple[float, ...]) -> None:
    order = blend_order(weights, 1000)
    assert np.array_equal(blend_order(weights, 100).file_of, order.file_of[:100])
    drawn = Counter(order.file_of.tolist())
    for number, weight in enumerate(weights):
        assert abs(drawn[number] - 1000 * weight / sum(weights)) <= len(weights)
        # Each file's own samples come one after another.
        assert order.sample_of[order.file_of == number].tolist() == list(range(drawn[number]))


def test_within_an_epoch_the_order_is_megatrons(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Megatron Core builds and reads its own index; the documents are spelled by an independent reader."""
    prepare()
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    from megatron_fp8.data.dataset import MegatronTokenizer

    lengths = lengths_of(40)
    generator = np.random.default_rng(1)
    with TokenFileWriter(tmp_path / "text", vocab_size=tokenizer.vocab_size) as writer:
        for length in lengths:
            writer.add_documents(generator.integers(0, 200, size=length).astype(writer.dtype), [int(length)])
    config: Any = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQ_LENGTH,
        blend_per_split=[([str(tmp_path / "text")], None), None, None],
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=MegatronTokenizer(tokenizer),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    file = GPTDataset.build_low_level_dataset(str(tmp_path / "text"), config)
    read = range(4, 36)
    theirs = GPTDataset(file, "text", np.arange(4, 36, dtype=np.int32), None, Split.train, config)
    order = file_order(lengths, read, SEQ_LENGTH, SEED, len(theirs))
    documents = decode_token_file(tmp_path / "text")
    ours = [[documents[document][token] for document, token in sample] for sample in cut_by_hand(order, lengths)]
    assert len(theirs) == samples_in(int(lengths[4:36].sum()), SEQ_LENGTH) == len(ours)
    for number, sample in enumerate(ours):
        assert [*theirs[number]["tokens"].tolist(), int(theirs[number]["labels"][-1])] == sample
