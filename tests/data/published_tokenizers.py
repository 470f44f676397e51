"""`tokenizer.json` files built like those of published models, with small vocabularies trained here."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "to be or not to be that is the question, 's and 'll; whether it is nobler in the mind\n",
    "def add(first, second):\n    return first + second  # Füße, 12345 東京 e\N{COMBINING ACUTE ACCENT}\n\n",
    "to suffer the slings and arrows // of outrageous fortune.\r\n\tor to take arms ./",
] * 10
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
QWEN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
NEMO = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(splitter: Any, special: Sequence[str], normalizer: Any = None, **model: Any) -> Tokenizer:
    """A BPE of bytes as letters, of texts split into words."""
    made = Tokenizer(models.BPE(**model))
    made.pre_tokenizer = splitter
    if normalizer is not None:
        made.normalizer = normalizer
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return made


def _of_regex(pattern: str, special: Sequence[str], normalizer: Any = None, **model: Any) -> Tokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _byte_level(pre_tokenizers.Sequence([split, letters]), special, normalizer, **model)


def _starting_with(made: Tokenizer, bos: str) -> Tokenizer:
    """Adds BOS to every text by default."""
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, made.token_to_id(bos))]
    )
    return made


def _gpt2() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])


def _llama3() -> Tokenizer:
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"]
    return _starting_with(_of_regex(LLAMA3, special, ignore_merges=True), "<|begin_of_text|>")


def _qwen(*inner: str) -> Tokenizer:
    made = _of_regex(QWEN, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizers.NFC())
    # Added tokens that are not special are found inside texts.
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in inner])
    return made


def _nemo() -> Tokenizer:
    return _starting_with(_of_regex(NEMO, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], ignore_merges=True), "<s>")


def _llama2() -> Tokenizer:
    """SentencePiece's kind of BPE, in which a space is a separate character and unknown characters become bytes."""
    trained = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", *bytes_], show_progress=False)
    trained.train_from_iterator(TEXTS, trainer)
    content = json.loads(trained.to_str())
    content["added_tokens"] = content["added_tokens"][:1]
    content["model"]["unk_token"] = "<unk>"
    made = Tokenizer.from_str(json.dumps(content))
    made.pre_tokenizer = None
    made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    made.add_special_tokens(["<s>", "</s>"])
    return _starting_with(made, "<s>")


_TOOLS = ("<tool_call>", "</tool_call>", "<|fim_prefix|>")
PUBLISHED: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "GPT-2": (_gpt2, "<|endoftext|>"),
    "Llama 2": (_llama2, "</s>"),
    "Llama 3": (_llama3, "<|end_of_text|>"),
    "Qwen 2.5": (lambda: _qwen(*_TOOLS), "<|endoftext|>"),
    "Qwen 3": (lambda: _qwen(*_TOOLS, "<think>", "</think>"), "<|endoftext|>"),
    "Mistral NeMo": (_nemo, "</s>"),
}
"""(makes it, what ends documents) by model."""


def write_published(name: str, folder: Path) -> Path:
    """The `tokenizer.json` of a model like `name`, with a `tokenizer_config.json` that names its EOS."""
    make, eos = PUBLISHED[name]
    path = folder / "tokenizer.json"
    make().save(str(path))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return path
