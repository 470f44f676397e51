"""Preprocessing writes the ids that the `tokenizers` library gives for each text alone, for published tokenizers."""

from __future__ import annotations

import json
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from published_tokenizers import PUBLISHED, write_published
from token_file_reference import decode_token_file

from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.prepare.encode import Settings, TokenizerFile
from megatron_fp8.prepare.input_files import find_inputs
from megatron_fp8.prepare.preprocess import Execution, preprocess

# What splitting, normalizers and added tokens could trip over, in any order.
PARTS = [
    *"a b z 1 25 12345 . / ' - ( é ß 東 A S".split(" "),
    *(" ", "  ", "\n", "\r\n", "\n\n", " \n", "\t", "\x85", "\0", "\x1c", "\n/", " to be", "to be or not"),
    *("'s", "'S", "'ll", "'LL", "\N{RIGHT SINGLE QUOTATION MARK}s"),
    *("\N{COMBINING ACUTE ACCENT}", "e\N{COMBINING ACUTE ACCENT}", "\N{NO-BREAK SPACE}", "\N{IDEOGRAPHIC SPACE}"),
    *("\N{LOWER ONE EIGHTH BLOCK}", "\N{LATIN SMALL LETTER LONG S}", "\N{KELVIN SIGN}", "\N{GREEK QUESTION MARK}"),
    *("\N{HANGUL CHOSEONG KIYEOK}", "\N{ARABIC-INDIC DIGIT ONE}", "\U0001f600", "\U00050000", "\ufdd0"),
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<s>", "[INST]", "<|im_start|>", "<tool_call>", "<think>"),
]
TEXT = st.lists(st.sampled_from(PARTS), max_size=40).map("".join) | st.text(st.characters(codec="utf-8"), max_size=40)


def of_every_category(number: int) -> list[str]:
    """Texts with characters of every Unicode category, the first and the last of each and some between."""
    points = defaultdict(list)
    for point in range(0x110000):
        points[unicodedata.category(chr(point))].append(chr(point))
    del points["Cs"]
    chosen = {name: found[:: max(len(found) // number, 1)] + found[-1:] for name, found in points.items()}
    joined = ["".join(found) for found in chosen.values()]
    return [*joined, *(f"a{found}1 '{found}b  {found}\n" for found in joined)]


NASTY = [
    *of_every_category(20),
    *("".join(pair) for pair in pairwise(PARTS)),
    "\N{COMBINING ACUTE ACCENT}" * 30,
    "a \N{COMBINING DIAERESIS} b \N{COMBINING CEDILLA}\N{COMBINING ACUTE ACCENT}\n\N{DEVANAGARI VOWEL SIGN AA}",
    *(f"to be{character * size}or not" for character in (" ", "\n", "\t", "\r\n", " \n") for size in (2, 3, 40, 3000)),
    *("7" * size for size in range(1, 12)),
    "1,234.5 \N{ROMAN NUMERAL TWELVE} \N{VULGAR FRACTION ONE HALF} \N{ARABIC-INDIC DIGIT ONE}\N{FULLWIDTH DIGIT TWO}",
    "\U0001f468\N{ZERO WIDTH JOINER}\U0001f469\N{ZERO WIDTH JOINER}\U0001f467 \U0001f1e9\U0001f1ea "
    "\U0001f44d\U0001f3fd \N{HEAVY BLACK HEART}\N{VARIATION SELECTOR-16}",
    "I'm he's they're we've she'll he'd don't I'M HE'S THEY'RE WE'VE SHE'LL HE'D DON'T",
    "<|endoftext|><|end_of_text|></s><s>[INST] <|im_end|> <tool_call>{}</tool_call><think></think><|fim_prefix|>",
    "one\r\ntwo\r\n\r\nthree\rfour\n\r",
    "",
    " ",
    "\n",
    "x" * 5000,
    "",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_published(name, tmp_path_factory.mktemp("published")) for name in PUBLISHED}


def ids_of_library(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """Each text's ids by the library alone, with special tokens in it read as text and none added around it."""
    library = tokenizers.Tokenizer.from_file(str(path))
    library.encode_special_tokens = True
    return [library.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize("block_bytes", [1, 700, 2**20])
@pytest.mark.parametrize("name", PUBLISHED)
def test_preprocessing_writes_the_librarys_ids(
    name: str, block_bytes: int, files: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "nasty.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in NASTY))
    with_ends = Settings(TokenizerFile(str(files[name])), append_eod=True)
    inputs = find_inputs([str(tmp_path / "nasty.jsonl")], "auto", ["text"])
    preprocess(inputs, str(tmp_path / "out"), with_ends, Execution(), block_bytes)
    eod = Tokenizer.load(files[name]).eod_id
    assert eod == tokenizers.Tokenizer.from_file(str(files[name])).token_to_id(PUBLISHED[name][1])
    expected = [[*ids, eod] for ids in ids_of_library(files[name], NASTY) if ids]
    assert sum(ids.count(eod) for ids in expected) == len(expected) > 100
    assert decode_token_file(tmp_path / "out_text_document") == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_batch_gives_the_ids_of_each_text_alone(name: str, files: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(files[name])

    @settings(deadline=None, max_examples=60)
    @given(texts=st.lists(TEXT, max_size=6))
    @example(texts=["a " * 200, "", " ", "\n"])
    def check(texts: Sequence[str]) -> None:
        assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == ids_of_library(files[name], texts)

    check()
