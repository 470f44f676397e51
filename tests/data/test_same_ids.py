"""However texts are joined, cut and encoded, the ids are those that a tokenizer's own library gives for each alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizer_kinds import BY_BYTE_PAIRS, JSON_KINDS, MODELS, NOWHERE, make
from tokenizers import Regex, pre_tokenizers

from megatron_fp8.data.encode import encode_documents
from megatron_fp8.data.sources.files import find_inputs
from megatron_fp8.data.sources.reading import read_blocks
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.data.vocab.joined_texts import has_long_spaces
from megatron_fp8.data.vocab.json_byte_pairs import JsonBytePairs
from megatron_fp8.data.vocab.patterns import PATTERNS, classes_of
from megatron_fp8.data.vocab.unicode_classes import AgreedCharacters

# What splittings, normalizers and cuts could trip over, beside letters, in any order.
PARTS = [
    *"abz 1 25 . / ' - \n \t ( é ß 東 A S".split(" "),
    *(
        " ",
        "  ",
        "\n",
        "\r\n",
        "\n\n",
        " \n",
        "/",
        "\n/",
        " a",
        " to be",
        "'s",
        "'LL",
        "to be or not",
        "e t",
        "<tool_call>",
    ),
    *("\N{COMBINING ACUTE ACCENT}", "e\N{COMBINING ACUTE ACCENT}", "\N{NO-BREAK SPACE}", "\N{IDEOGRAPHIC SPACE}"),
    *(
        "\N{LOWER ONE EIGHTH BLOCK}",
        "\x1c",
        "\N{LATIN SMALL LETTER LONG S}",
        "\x85",
        "\0",
        "\N{DIAERESIS}",
        "\N{KELVIN SIGN}",
        "\N{GREEK QUESTION MARK}",
    ),
    *(
        "<|endoftext|>",
        "\ufdd0between\ufdd1",
        "\U0001f600",
        "\U00050000",
        "\N{HANGUL CHOSEONG KIYEOK}",
        "\N{ARABIC-INDIC DIGIT ONE}",
    ),
]
TEXT = st.lists(st.sampled_from(PARTS), max_size=40).map("".join) | st.text(max_size=40)
PROPERTY = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = [*JSON_KINDS, *MODELS]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make(kind, tmp_path_factory.mktemp("kind")) for kind in KINDS}


@pytest.fixture
def always_by_byte_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fp8.data.vocab.hugging_face._WORTH_CHARS", 0)


def load(kind: str, files: dict[str, Path], cache: dict[str, Tokenizer] = {}) -> Tokenizer:  # noqa: B006
    """Loaded once, as a worker does."""
    if kind not in cache:
        cache[kind] = Tokenizer.load(files[kind])
    return cache[kind]


def library_of(path: Path) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_file(str(path))
    library.encode_special_tokens = True
    return library


@pytest.mark.parametrize("kind", JSON_KINDS)
def test_many_texts_in_one_call_give_the_librarys_ids(
    kind: str, files: dict[str, Path], always_by_byte_pairs: None
) -> None:
    tokenizer, library = load(kind, files), library_of(files[kind])
    assert (tokenizer._backend._byte_pairs is not None) == (kind in BY_BYTE_PAIRS)

    @PROPERTY
    @given(texts=st.lists(TEXT, max_size=6))
    @example(texts=["a " * 200, "", " ", "\n"])
    def check(texts: Sequence[str]) -> None:
        expected = [library.encode(text, add_special_tokens=False).ids for text in texts]
        assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_texts_in_parts_give_the_ids_of_the_whole(
    kind: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_fp8.data.encode.LONGEST_PIECE_CHARS", 4)
    tokenizer = load(kind, files)
    assert (tokenizer.cuts is None) == (kind in NOWHERE)

    @PROPERTY
    @given(texts=st.lists(TEXT, min_size=1, max_size=3))
    @example(texts=["to be or not to be\nthat is\n/the question.\n/ and"])
    def check(texts: Sequence[str]) -> None:
        whole = [tokenizer.encode(text) for text in texts]
        assert encode_documents(texts, tokenizer, append_eod=False).tokens.tolist() == list(chain(*whole))

    check()


@pytest.mark.parametrize("name", PATTERNS)
def test_ranks_too(name: str, ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fp8.data.encode.LONGEST_PIECE_CHARS", 4)
    tokenizer = Tokenizer.load(ranks, tiktoken_pattern=name)

    @PROPERTY
    @given(texts=st.lists(TEXT, min_size=1, max_size=3))
    def check(texts: Sequence[str]) -> None:
        whole = [tokenizer.encode(text) for text in texts]
        assert encode_documents(texts, tokenizer, append_eod=False).tokens.tolist() == list(chain(*whole))

    check()


def test_texts_are_cut_at_all(files: dict[str, Path]) -> None:
    text = "to be or not to be,\nthat is the question " * 20
    for kind in set(KINDS) - NOWHERE:
        cuts = load(kind, files).cuts
        assert cuts is not None
        parts = list(cuts.parts(text, 30))
        assert len(parts) > 20
        assert max(map(len, parts)) <= 30
        assert (" " if cuts.begins_with_space else "").join(parts) == text


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "metaspace", "bpe model", "bert", "unigram model"])
def test_a_long_file_gives_the_ids_of_its_text(kind: str, files: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = load(kind, files)
    (tmp_path / "in").mkdir()
    text = "".join(f"line {number}  of\nmany\r\n/words{number} " for number in range(200))
    for name, content in (("a", "one"), ("b", text), ("c", "two")):
        (tmp_path / "in" / name).write_bytes(content.encode())
    found: list[int] = []
    blocks = list(
        read_blocks(find_inputs([str(tmp_path / "in")], "auto", ["text"]), ["text"], tokenizer.cuts, None, 300)
    )
    for block in blocks:
        texts = [piece.text.decode() for piece in block.pieces]
        found += encode_documents(texts, tokenizer, False, block.continues, block.open_end).tokens.tolist()
    assert (len(blocks) > 10) == (tokenizer.cuts is not None)
    assert found == [*tokenizer.encode("one"), *tokenizer.encode(text), *tokenizer.encode("two")]


@given(size=st.integers(0, 2**18 + 100), before=st.integers(0, 2**17))
@settings(deadline=None, max_examples=20)
def test_long_rows_of_spaces_are_noticed(size: int, before: int) -> None:
    text = "a" * before + " \n" * (size // 2) + "a"
    if size < 2**17 or size >= 2**18:
        assert has_long_spaces(text) == (size >= 2**18)


@pytest.mark.slow
def test_a_million_spaces_in_a_row(files: dict[str, Path], ranks: Path) -> None:
    text = "to be" + " " * (2**20 + 7) + "or not"
    for tokenizer in (load("gpt2", files), Tokenizer.load(ranks, tiktoken_pattern="gpt2")):
        assert tokenizer.decode(tokenizer.encode_batch([text])[0].tolist()) == text
    library = library_of(files["gpt2"])
    assert load("gpt2", files).encode_batch([text])[0].tolist() == library.encode(text, add_special_tokens=False).ids


def test_a_token_of_two_merges_is_left_to_the_library(files: dict[str, Path]) -> None:
    content = json.loads(files["gpt2"].read_text(encoding="utf-8"))
    assert JsonBytePairs.of(content) is not None
    merges = content["model"]["merges"]
    left, right = next(
        merge for merge in merges if len(merge[0]) > 1 and merge[0][1:] + merge[1] in content["model"]["vocab"]
    )
    merges.append([left[0], left[1:] + right])
    assert JsonBytePairs.of(content) is None


def test_a_token_that_its_own_bytes_do_not_give_is_left_to_the_library(files: dict[str, Path]) -> None:
    """ab, bc and abc = a + bc: the bytes of abc become ab, c, but tiktoken would join these too."""
    content = json.loads(files["gpt2"].read_text(encoding="utf-8"))
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    tokens = ["QZ", "ZJ", "QZJ"]
    vocabulary.update({token: 1000 + number for number, token in enumerate(tokens)})
    merges += [["Q", "Z"], ["Z", "J"], ["Q", "ZJ"]]
    assert JsonBytePairs.of(content) is None
    merges[-1] = ["QZ", "J"]
    assert JsonBytePairs.of(content) is not None


@pytest.mark.slow
def test_characters_are_classed_alike_or_left_to_the_library(files: dict[str, Path]) -> None:
    """Every character, where it could count as a letter, a number, a space or a part of a shortened word."""
    for kind in sorted(BY_BYTE_PAIRS - {"gpt2 with inner tokens"}):
        tokenizer, library = load(kind, files), library_of(files[kind])
        points = [point for point in range(0x40000) if not 0xD800 <= point < 0xE000]
        for begin in range(0, len(points), 1000):
            texts = [f"a{chr(point)}1 '{chr(point)}b  {chr(point)}\n" for point in points[begin : begin + 1000]]
            expected = [encoding.ids for encoding in library.encode_batch(texts, add_special_tokens=False)]
            assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected


def test_a_character_of_two_classes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = AgreedCharacters(classes_of(r"\p{L}|\p{N}|\s"), is_nfc=True)
    assert agreed.are_all_of("Füße 東京 123\n\N{HANGUL SYLLABLE GA}")
    assert not agreed.are_all_of("a\U00050000")
    assert not agreed.are_all_of("a\U000323b0")  # not yet a character
    # The libraries' \w and [[:alpha:]] are no such classes: marks belong to one alone.
    found = pre_tokenizers.Split(Regex(r"[[:word:]]"), "removed").pre_tokenize_str("a\N{COMBINING ACUTE ACCENT}b")
    assert found == []
