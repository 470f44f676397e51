"""Owns where the texts of a `tokenizer.json` may be cut, by what it does to a text. Where it is not sure: nowhere.

A place between two characters is one to cut at if normalizing does not look across it, no word reaches across it, and
what is put before a text is put before what follows it too, or can be left out there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron_fp8.data.cuts import AT_SPACES, BEFORE_WORDS, WORDS_AND_LINES, Cuts
from megatron_fp8.data.vocab.json_byte_pairs import pattern_of
from megatron_fp8.data.vocab.patterns import PATTERNS, PATTERNS_OF_JSON

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# Neither a space nor the end of a line combines with what stands beside it.
_COMPOSING = ({"type": "NFC"}, {"type": "NFD"})
# A cut would stand in no word of such a model: one from before a space to after it would be needed.
_ACROSS = re.compile(rf"[^{_SPACE}]{_SPACE}")


def cuts_of(content: Mapping[str, Any]) -> Cuts | None:
    """Where to cut; None: nowhere."""
    if content["model"].get("dropout"):
        return None
    cuts = _without_added_tokens(content)
    inner = [token for token in content.get("added_tokens", []) if not token.get("special", False)]
    if cuts is None or any(_reaches_across(token, cuts) for token in inner):
        return None
    if inner and cuts.begins_with_space:
        # The text after such a token is normalized as one of its own.
        return None
    return cuts


def _reaches_across(token: Mapping[str, Any], cuts: Cuts) -> bool:
    """Whether an added token may take a place to cut into itself, or depend on what stands around it."""
    depends = any(token.get(key, False) for key in ("lstrip", "rstrip", "single_word"))
    return depends or cuts.places.search(token["content"]) is not None


def _without_added_tokens(content: Mapping[str, Any]) -> Cuts | None:
    normalizer, splitter = content.get("normalizer"), content.get("pre_tokenizer")
    if normalizer is None or normalizer in _COMPOSING:
        return _of_words(content, normalizer is None)
    if splitter is None and normalizer == _prepends_and_replaces() and _has_no_word_across(content):
        return AT_SPACES
    return None


def _of_words(content: Mapping[str, Any], is_plain: bool) -> Cuts | None:
    """Where nothing but composing characters comes before the splitting into words."""
    splitter = content.get("pre_tokenizer") or {}
    pattern = pattern_of(content)
    if pattern in PATTERNS_OF_JSON or pattern in PATTERNS.values():
        return WORDS_AND_LINES
    if splitter.get("type") == "ByteLevel" and splitter.get("use_regex", True):
        # It puts a space before a text that does not begin with one.
        return BEFORE_WORDS
    if splitter.get("type") == "Metaspace" and is_plain and splitter.get("replacement") == _SPACE:
        # It too. Without splitting, words are what the model makes of the whole.
        return BEFORE_WORDS if splitter.get("split", True) or _has_no_word_across(content) else None
    return None


def _prepends_and_replaces() -> Mapping[str, Any]:
    """What Llama's tokenizers do to a text: as SentencePiece, which has a space before each text."""
    steps = [
        {"type": "Prepend", "prepend": _SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    ]
    return {"type": "Sequence", "normalizers": steps}


def _has_no_word_across(content: Mapping[str, Any]) -> bool:
    """Whether a BPE, of which a whole text is one word, has no token with a space after something else."""
    model = content["model"]
    if model.get("type") != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    return _SPACE in model["vocab"] and not any(_ACROSS.search(token) for token in model["vocab"])
