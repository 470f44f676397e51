"""Owns the regular expressions by which byte-level tokenizers split texts into words before tokens are merged.

Sources: tiktoken's `openai_public`; of `v1` and `v2` Megatron Core's `tiktoken_tokenizer`; of those in a
`tokenizer.json` the `tokenizers` library (`GPT2_OF_TOKENIZERS`) and published files.
"""

from __future__ import annotations

import re

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORTENED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
PATTERNS = {
    "gpt2": _GPT2,
    "r50k_base": _GPT2,
    "p50k_base": _GPT2,
    "cl100k_base": _CL100K,
    "o200k_base": _WORDS % (f"{_SHORTENED}?", f"{_SHORTENED}?") + r"|\p{N}{1,3}" + _TAIL,
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": _WORDS % ("", "") + r"|\p{N}" + _TAIL,
}
"""Of files of ranks, by name. All split where `cuts.WORDS_AND_LINES` says."""

GPT2_OF_TOKENIZERS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _SHORTENED + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS_OF_JSON = frozenset(
    [GPT2_OF_TOKENIZERS, _LLAMA3 % "{1,3}", _LLAMA3 % "", PATTERNS["o200k_base"], PATTERNS["v2"]]
)
"""Those that mean the same to the `tokenizers` library and to tiktoken, if characters belong to the same classes for
both (`unicode_classes`). In others `$` may stand, which is the end of a line for one and of the text for the other."""


def classes_of(pattern: str) -> tuple[str, ...]:
    """The classes of characters that one of `PATTERNS_OF_JSON` asks for."""
    names = sorted(set(re.findall(r"\\p\{\w+\}", pattern)))
    # Which characters fold to the letters of 's, 'd and so on.
    return (*names, r"\s", *(["(?i:[sdmtlrve])"] if "(?i:" in pattern else []))
