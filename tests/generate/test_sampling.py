"""The choice of tokens: filters as transformers' processors have them, draws by chance, text piece by piece."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron_fp8.commands.generate import TextStream, prompt_tokens
from megatron_fp8.generate.generation import Sampling, filtered, next_tokens
from megatron_fp8.prepare.train_tokenizer import train_bpe


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 1.0])
def test_filters_are_those_of_transformers(temperature, top_k, top_p) -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1)) * 3
    # Equally likely tokens, and padding.
    logits[0, :10] = 1.5
    logits[:, 45:] = -torch.inf
    expected = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1.0 else logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(filtered(logits, Sampling(False, temperature, top_k, top_p)), expected)


def test_tokens_are_drawn_by_their_chance_and_never_without_one() -> None:
    chances = torch.tensor([0.5, 0.0, 0.3, 0.2])
    generators = [torch.Generator().manual_seed(seed) for seed in range(4000)]
    drawn = torch.tensor(next_tokens(chances.log().expand(4000, -1), Sampling(), generators))
    torch.testing.assert_close(drawn.bincount(minlength=4) / 4000, chances, atol=0.03, rtol=0)
    assert 1 not in drawn


def test_greedy_takes_the_most_likely_whatever_the_rest_says() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.0]])
    generators = [torch.Generator(), torch.Generator()]
    assert next_tokens(logits, Sampling(greedy=True, temperature=9.0, top_k=2), generators) == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-40, 1e-29])
def test_without_any_temperature_the_most_likely_is_taken(temperature) -> None:
    logits = torch.tensor([[50.0, 300.0, 10.0], [2.0, -torch.inf, 1.0]])
    generators = [torch.Generator(), torch.Generator()]
    assert next_tokens(logits, Sampling(temperature=temperature, top_p=0.9), generators) == [1, 0]


def test_text_comes_in_whole_characters_and_all_of_it(tmp_path) -> None:
    tokenizer = train_bpe(["abc"], 257, tmp_path / "tokenizer.json")
    text = "x = 'é€😀'\n"
    tokens = tokenizer.encode(text)
    assert len(tokens) > len(text)
    stream = TextStream(tokenizer, tokenizer.encode("# "))
    pieces = [stream.add(token) for token in tokens[:-1]]
    assert "".join(pieces) == text[:-1]
    assert [piece for piece in pieces if piece] == list(text[:-1])
    assert stream.rest() == ""
    # An end in the middle of a character shows that something is missing.
    unfinished = TextStream(tokenizer, [])
    assert unfinished.add(tokenizer.encode("é")[0]) == ""
    assert unfinished.rest() == "\N{REPLACEMENT CHARACTER}"


def test_an_empty_prompt_is_the_beginning_of_a_document(tmp_path) -> None:
    tokenizer = train_bpe(["abc"], 257, tmp_path / "tokenizer.json")
    assert prompt_tokens(tokenizer, "") == [tokenizer.eod_id]
    assert prompt_tokens(tokenizer, "a") == tokenizer.encode("a")
