"""Small tokenizers of every kind that is in use, trained now: each as published ones of that kind are built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatron_fp8.data.tokenizer import END_OF_DOCUMENT
from megatron_fp8.data.vocab.patterns import PATTERNS, PATTERNS_OF_JSON

TEXTS = [
    "to be or not to be that is the question, 's and 'll; whether it is nobler in the mind\n",
    "def add(first, second):\n    return first + second  # Füße, 12345 東京 e\N{COMBINING ACUTE ACCENT}\n\n",
    "to suffer the slings and arrows // of outrageous fortune.\r\n\tor to take arms ./",
] * 10
LLAMA3 = next(pattern for pattern in PATTERNS_OF_JSON if r"{1,3}| ?[^\s" in pattern and "Lu" not in pattern)
QWEN2 = next(pattern for pattern in PATTERNS_OF_JSON if pattern == LLAMA3.replace("{1,3}", ""))
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def byte_level(splitter: Any, normalizer: Any = None, **model: Any) -> Tokenizer:
    """GPT-2's kind: bytes as letters, and a splitting into words."""
    made = Tokenizer(models.BPE(**model))
    made.pre_tokenizer = splitter
    if normalizer is not None:
        made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return made


def of_regex(pattern: str, normalizer: Any = None, **model: Any) -> Tokenizer:
    """Llama 3's, Qwen's and GPT-4o's kind."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return byte_level(pre_tokenizers.Sequence([split, letters]), normalizer, **model)


def of_spaces(splitter: Any, normalizer: Any, **model: Any) -> Tokenizer:
    """SentencePiece's kind of BPE, in which a space is a sign of its own."""
    trained = Tokenizer(models.BPE(byte_fallback=True, **model))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *bytes_], show_progress=False)
    trained.train_from_iterator(TEXTS, trainer)
    content = json.loads(trained.to_str())
    content["added_tokens"] = content["added_tokens"][:1]
    content["model"]["unk_token"] = "<unk>"
    # As in published ones: rows of spaces are tokens too.
    vocabulary = content["model"]["vocab"]
    for size in (2, 4):
        vocabulary[_SPACE * size] = len(vocabulary)
        content["model"]["merges"].insert(0 if size == 2 else 1, [_SPACE * (size // 2)] * 2)
    made = Tokenizer.from_str(json.dumps(content))
    made.pre_tokenizer = splitter
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def unigram(normalizer: Any = None) -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    if normalizer is not None:
        made.normalizer = normalizer
    trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    return made


def bert() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    return made


def _with_inner_tokens(made: Tokenizer) -> Tokenizer:
    made.add_tokens(["<tool_call>", "'s"])
    return made


def _llama2() -> Tokenizer:
    steps = [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    return of_spaces(None, normalizers.Sequence(steps), fuse_unk=True)


def _plain_gpt2() -> Tokenizer:
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


JSON_KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": _plain_gpt2,
    "gpt2 with inner tokens": lambda: _with_inner_tokens(_plain_gpt2()),
    "llama3": lambda: of_regex(LLAMA3, ignore_merges=True),
    "qwen2": lambda: of_regex(QWEN2, normalizers.NFC()),
    "gpt4o": lambda: of_regex(PATTERNS["o200k_base"]),
    "roberta": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama2": _llama2,
    "metaspace": lambda: of_spaces(pre_tokenizers.Metaspace(), None),
    "metaspace of whole texts": lambda: of_spaces(pre_tokenizers.Metaspace(prepend_scheme="first", split=False), None),
    "metaspace without prefix": lambda: of_spaces(pre_tokenizers.Metaspace(prepend_scheme="never"), None),
    "unigram": unigram,
    "t5": lambda: unigram(normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])),
    "bert": bert,
    "stripped": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Strip()),
    "nfkc": lambda: of_regex(QWEN2, normalizers.NFKC()),
    "replaced": lambda: of_regex(QWEN2, normalizers.Replace(Regex(r"e t"), "x")),
    "another regex": lambda: of_regex(r"\w+ \w+|[\s\S]"),
}
BY_BYTE_PAIRS = {"gpt2", "gpt2 with inner tokens", "llama3", "qwen2", "gpt4o"}
"""Those that tiktoken's core encodes."""
NOWHERE = {"t5", "bert", "stripped", "nfkc", "replaced", "another regex", "unigram model", "normalized model"}
"""Those whose texts are not cut."""
MODELS: dict[str, dict[str, Any]] = {
    "bpe model": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "bpe model without prefix": {
        "model_type": "bpe",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
    },
    "unigram model": {"model_type": "unigram", "normalization_rule_name": "identity"},
    "normalized model": {"model_type": "bpe"},
}


def make(kind: str, folder: Path) -> Path:
    """The file of a tokenizer of one of `JSON_KINDS` and `MODELS`; it ends documents with `<|endoftext|>`."""
    if kind in MODELS:
        path = folder / "own.model"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text.strip() for text in TEXTS),
            model_prefix=str(path.with_suffix("")),
            hard_vocab_limit=False,
            minloglevel=2,
            control_symbols=[END_OF_DOCUMENT],
            **{"vocab_size": 400 if "byte_fallback" in MODELS[kind] else 120} | MODELS[kind],
        )
        return path
    made = JSON_KINDS[kind]()
    made.add_special_tokens([END_OF_DOCUMENT])
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path
