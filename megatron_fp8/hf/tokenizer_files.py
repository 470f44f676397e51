"""Owns the tokenizer's files: what is copied between a run and a Hugging Face folder. Imports no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_fp8.data.tokenizer import Tokenizer, TokenizerError
from megatron_fp8.data.vocab.backend import EOD
from megatron_fp8.errors import BadInputError

TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
# What belongs to a tokenizer beside its own file, where it is there.
_COMPANIONS = (_CONFIG, "special_tokens_map.json", "chat_template.jinja")


def require_tokenizer(path: Path, option: str) -> Path:
    """`path`, which is a `tokenizer.json`; BadInputError otherwise."""
    if path.is_file():
        return path
    raise BadInputError(
        f"{path} does not exist, and a model without its tokenizer is of little use: name one with {option} FILE, or "
        "say --no-tokenizer. From slow tokenizers, transformers' AutoTokenizer.from_pretrained(FOLDER)"
        ".save_pretrained(FOLDER) makes the file"
    )


def copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Copy a tokenizer and what lies beside it and belongs to it into `folder`."""
    shutil.copyfile(tokenizer, folder / TOKENIZER)
    for name in _COMPANIONS:
        if tokenizer.with_name(name).is_file():
            shutil.copyfile(tokenizer.with_name(name), folder / name)


def describe_tokenizer(folder: Path, num_positions: int, eod_token: str) -> dict[str, int]:
    """Make the copied tokenizer one that transformers loads; the ids of its special tokens, for `config.json`.

    Without a description of its own, what stands between documents ends a text, and begins one, as in GPT-2.
    It pads as well, since Trainer wants a token for that; not in `config.json`, which would freeze its embedding.
    """
    path = folder / _CONFIG
    if path.is_file():
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    else:
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": eod_token,
            "eos_token": eod_token,
            "pad_token": eod_token,
            "model_max_length": num_positions,
            "clean_up_tokenization_spaces": False,
        }
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    ids = _added_tokens(folder / TOKENIZER)
    found = {}
    for name in ("bos_token", "eos_token"):
        token = settings.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if content in ids:
            found[f"{name}_id"] = ids[content]
    return found


def ends_documents(tokenizer: Path) -> bool:
    """Whether a tokenizer has a token to put between documents. Raises TokenizerError for a broken file."""
    try:
        Tokenizer.load(tokenizer)
    except TokenizerError as error:
        if error.key != EOD:
            raise
        return False
    return True


def _added_tokens(tokenizer: Path) -> dict[str, int]:
    try:
        tokens = json.loads(tokenizer.read_text(encoding="utf-8")).get("added_tokens", [])
        return {token["content"]: token["id"] for token in tokens}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInputError(f"{tokenizer} is not a tokenizer.json of the tokenizers library: {error!r}") from error
