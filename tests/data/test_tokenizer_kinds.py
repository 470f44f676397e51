"""Each kind of tokenizer gives the ids of its own library, ends documents, and says what is wrong with a file."""

import base64
import json
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_fp8.data.tiktoken_ranks import PATTERNS
from megatron_fp8.data.tokenizer import END_OF_DOCUMENT, Tokenizer, TokenizerError

LINES = [
    "to be or not to be that is the question",
    "whether it is nobler in the mind",
    "to suffer the slings and arrows",
]
PRINTABLE = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]))


def sentencepiece_model(path: Path, **changes: object) -> Path:
    """A small model, trained here."""
    arguments = {"vocab_size": 60, "model_type": "bpe", "byte_fallback": False, "minloglevel": 2} | changes
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20), model_prefix=str(path.with_suffix("")), hard_vocab_limit=False, **arguments
    )
    return path


@pytest.fixture(scope="session")
def llama_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sentencepiece_model(tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model")


@settings(deadline=None)
@given(text=PRINTABLE)
def test_bytes_are_their_own_ids(text: str) -> None:
    tokenizer = Tokenizer.load(None, "ByteLevelTokenizer")
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eod_id]) == text + END_OF_DOCUMENT
    assert (tokenizer.eod_id, tokenizer.vocab_size, tokenizer.path) == (256, 257, None)


def test_sentencepiece_ids_are_its_librarys(llama_like: Path) -> None:
    tokenizer = Tokenizer.load(llama_like)
    library = sentencepiece.SentencePieceProcessor(model_file=str(llama_like))
    assert tokenizer.tokenizer_type == "SentencePieceTokenizer"
    assert tokenizer.eod_id == library.eos_id()
    assert tokenizer.vocab_size == library.get_piece_size()
    texts = [*LINES, "the </s> is letters here", ""]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == library.encode(texts)
    assert all(tokenizer.eod_id not in tokenizer.encode(text) for text in texts)
    ids = [*tokenizer.encode(LINES[0]), tokenizer.eod_id, *tokenizer.encode(LINES[1])]
    assert tokenizer.decode(ids) == f"{LINES[0]}</s>{LINES[1]}"


def test_a_control_piece_named_endoftext_comes_before_the_models_own_end(tmp_path: Path) -> None:
    path = sentencepiece_model(tmp_path / "own.model", control_symbols=[END_OF_DOCUMENT, "<doc>"])
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert Tokenizer.load(path).eod_id == library.piece_to_id(END_OF_DOCUMENT)
    assert Tokenizer.load(path, eod_token="<doc>").eod_id == library.piece_to_id("<doc>")


def test_an_end_token_that_a_text_can_contain_is_refused(tmp_path: Path, llama_like: Path) -> None:
    path = sentencepiece_model(tmp_path / "own.model", user_defined_symbols=["<doc>"], eos_id=-1)
    with pytest.raises(TokenizerError, match=r"inside a text") as caught:
        Tokenizer.load(path, eod_token="<doc>")
    assert caught.value.key == "eod_token"
    with pytest.raises(TokenizerError, match=r"neither a control piece"):
        Tokenizer.load(path)
    with pytest.raises(TokenizerError, match=r"has no piece <doc>"):
        Tokenizer.load(llama_like, eod_token="<doc>")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(text=PRINTABLE)
def test_ranks_give_the_ids_of_tiktoken_and_of_the_same_vocabulary(
    text: str, ranks: Path, tokenizer: Tokenizer
) -> None:
    ours = Tokenizer.load(ranks, tiktoken_pattern="gpt2")
    assert ours.decode(ours.encode(text)) == text
    # The tokenizers library merges by its list of merges, tiktoken by rank: the same, in the same order.
    assert ours.encode(text) == [token - 1 for token in tokenizer.encode(text)]


def test_a_million_spaces_in_a_row_are_encoded(ranks: Path, tokenizer: Tokenizer) -> None:
    """Tiktoken's regular expressions run out of stack there."""
    text = "to be" + " " * (2**20 + 7) + "or not"
    ours = Tokenizer.load(ranks, tiktoken_pattern="gpt2")
    assert ours.encode(text) == [token - 1 for token in tokenizer.encode(text)]


def test_the_end_of_a_document_follows_the_ranks(ranks: Path, tokenizer: Tokenizer) -> None:
    ours = Tokenizer.load(ranks, tiktoken_pattern="cl100k_base", eod_token="<end>")
    assert ours.tokenizer_type == "TikTokenizer"
    assert (ours.eod_id, ours.vocab_size) == (tokenizer.vocab_size - 1, tokenizer.vocab_size)
    assert ours.eod_id not in ours.encode("a <end> in a text")
    assert ours.decode([ours.eod_id]) == "<end>"


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_cover_every_character(name: str, ranks: Path) -> None:
    text = "It's 12345 Füße,\n\n  DON'T\tstop (now)!  \r\n x_1=東京 "
    ours = Tokenizer.load(ranks, tiktoken_pattern=name)
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("name", ["r50k_base", "p50k_base", "cl100k_base", "o200k_base"])
def test_patterns_are_tiktokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken_ext.openai_public as published

    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *arguments, **named: {})
    assert PATTERNS[name] == getattr(published, name)()["pat_str"]


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_patterns_are_megatrons(name: str) -> None:
    from megatron_fp8.device import prepare

    prepare()  # Megatron Core is imported below
    from megatron.core.tokenizers.text.libraries import tiktoken_tokenizer

    assert PATTERNS[name] == getattr(tiktoken_tokenizer, f"_PATTERN_TIKTOKEN_{name.upper()}")


def test_a_published_file_needs_no_pattern(ranks: Path, tmp_path: Path) -> None:
    path = tmp_path / "cl100k_base.tiktoken"
    path.write_bytes(ranks.read_bytes())
    tokenizer = Tokenizer.load(path)
    assert tokenizer.eod_id == 100257
    content = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in ranks.read_bytes().splitlines()}
    library = tiktoken.Encoding("c", pat_str=PATTERNS["cl100k_base"], mergeable_ranks=content, special_tokens={})
    assert tokenizer.encode(LINES[0]) == library.encode(LINES[0])
    # A model may generate ids that are not tokens: those between the ranks and the end.
    assert tokenizer.decode([*tokenizer.encode("a"), 100256, tokenizer.eod_id]) == "a<|100256|><|endoftext|>"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda lines: [*lines[:5], b"?? 7", *lines[6:]], "line 6: not a token and a rank"),
        (lambda lines: lines[1:], "has no rank for byte"),
        (lambda lines: [*lines, lines[-1].split()[0][:-4] + b"AAAA 3"], "gives two tokens the same rank"),
    ],
)
def test_broken_ranks_are_named(change: object, reason: str, ranks: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken.tiktoken"
    path.write_bytes(b"\n".join(change(ranks.read_bytes().splitlines())))
    with pytest.raises(TokenizerError, match=reason):
        Tokenizer.load(path, tiktoken_pattern="gpt2")


def test_an_unknown_pattern_names_its_key(ranks: Path) -> None:
    for pattern, reason in ((None, "does not say how text is split"), ("(", "neither one of gpt2")):
        with pytest.raises(TokenizerError, match=reason) as caught:
            Tokenizer.load(ranks, tiktoken_pattern=pattern)
        assert caught.value.key == "tiktoken_pattern"


def other_tokenizer(folder: Path, special: bool = True) -> Path:
    """A `tokenizer.json` of words, which ends documents with `</s>`."""
    words = {
        word: number for number, word in enumerate(["[UNK]", *sorted({w for line in LINES for w in line.split()})])
    }
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    token = tokenizers.AddedToken("</s>", special=special)
    backend.add_special_tokens([token]) if special else backend.add_tokens([token])
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_a_folder_and_the_end_token_beside_it(tmp_path: Path) -> None:
    folder = other_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"has no end-of-document token <\|endoftext\|>"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.path == str(folder / "tokenizer.json")
    assert tokenizer.decode([tokenizer.eod_id]) == "</s>"
    assert tokenizer.eod_id not in tokenizer.encode("to be </s> or not")
    assert Tokenizer.load(folder, eod_token="</s>").eod_id == tokenizer.eod_id


def test_an_added_token_that_texts_give_cannot_end_documents(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="inside a text as the end of a document"):
        Tokenizer.load(other_tokenizer(tmp_path, special=False), eod_token="</s>")


def test_wrong_kinds_are_refused(tokenizer: Tokenizer, llama_like: Path, ranks: Path) -> None:
    with pytest.raises(TokenizerError, match="not a SentencePiece model"):
        Tokenizer.load(tokenizer.path, "SentencePieceTokenizer")
    with pytest.raises(TokenizerError, match=r"not a tokenizer\.json"):
        Tokenizer.load(llama_like, "HuggingFaceTokenizer")
    with pytest.raises(TokenizerError, match="takes no file"):
        Tokenizer.load(ranks, "ByteLevelTokenizer")
    with pytest.raises(TokenizerError, match="unknown tokenizer type GPT9"):
        Tokenizer.load(ranks, "GPT9")
