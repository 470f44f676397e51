"""Where documents begin inside samples: Megatron's own masks and positions say the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from megatron_fp8.config.schema import DataConfig
from megatron_fp8.data.documents import cumulative_lengths, document_positions, document_rules
from megatron_fp8.data.tokenizer import Tokenizer, TokenizerError
from megatron_fp8.device import prepare

prepare()  # Megatron Core is imported below

from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids  # noqa: E402

EOD = 1
LENGTH = 6
SAMPLES = st.lists(st.lists(st.integers(0, 3), min_size=LENGTH, max_size=LENGTH), min_size=1, max_size=3)


def megatrons(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which token may attend which `[s, s]`, which count `[s]`, and positions `[s]`, of one sample."""
    forbidden, loss_mask, positions = _get_ltor_masks_and_position_ids(tokens, EOD, True, True, True, True)
    return ~forbidden[0], loss_mask, positions


@given(SAMPLES)
@example([[EOD, 0, 0, 0, 0, 0], [0, 0, EOD, EOD, 0, 0], [0, 0, 0, 0, 0, EOD]])
@example([[0] * LENGTH])
@example([[EOD] * LENGTH] * 3)
def test_documents_are_megatrons(rows: list[list[int]]) -> None:
    tokens = torch.tensor(rows)
    cu_seqlens = cumulative_lengths(tokens, EOD)
    assert cu_seqlens.dtype == torch.int32
    # What the documents' causal attention allows, over all samples one after another.
    allowed = torch.zeros(tokens.numel(), tokens.numel(), dtype=torch.bool)
    for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        allowed[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
    expected = torch.block_diag(*(megatrons(sample)[0].int() for sample in tokens)).bool()
    assert torch.equal(allowed, expected)
    assert torch.equal(document_positions(tokens, EOD), torch.stack([megatrons(sample)[2] for sample in tokens]))


@given(SAMPLES)
def test_the_number_of_documents_takes_few_values(rows: list[list[int]]) -> None:
    cu_seqlens = cumulative_lengths(torch.tensor(rows), EOD)
    lengths = cu_seqlens.diff().tolist()
    num_documents = len(lengths) - lengths.count(0)
    assert len(lengths) in (1, 2, 4, 8, 16, 32)
    assert num_documents <= len(lengths) < 2 * num_documents
    assert 0 not in lengths[:num_documents]


def test_megatron_leaves_out_of_the_loss_what_follows_an_end() -> None:
    """`data.eod_mask_loss` is Megatron's: the token that counts not is the one predicted from the end of a document."""
    tokens = torch.tensor([0, EOD, EOD, 2, 3, EOD])
    assert megatrons(tokens)[1].tolist() == [1, 0, 0, 1, 1, 0]


def test_rules_are_the_configs(tokenizer: Tokenizer) -> None:
    assert document_rules(DataConfig()) is None
    path = tokenizer.path
    rules = document_rules(DataConfig(tokenizer_model=path, reset_position_ids=True))
    assert rules is not None
    assert (rules.eod_id, rules.reset_position_ids, rules.reset_attention_mask) == (tokenizer.eod_id, True, False)
    with pytest.raises(TokenizerError):
        document_rules(DataConfig(reset_attention_mask=True))
