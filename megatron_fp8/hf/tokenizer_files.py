"""Copies tokenizer files between a run and a Hugging Face folder. Imports no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_fp8.data.tokenizer import Tokenizer, TokenizerError
from megatron_fp8.data.tokenizer_kinds import EOD
from megatron_fp8.errors import BadInputError

TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
# Optional files that belong to a tokenizer.
_COMPANIONS = (_CONFIG, "special_tokens_map.json", "chat_template.jinja")


def require_tokenizer(path: Path) -> Path:
    """`path`; BadInputError if there is no such file."""
    if path.is_file():
        return path
    raise BadInputError(
        f"{path} does not exist, and a model without its tokenizer is of little use: use --tokenizer FILE, or "
        "--no-tokenizer. For slow tokenizers, transformers' AutoTokenizer.from_pretrained(FOLDER)"
        ".save_pretrained(FOLDER) creates the file"
    )


def copy_tokenizer(tokenizer: Path, folder: Path) -> None:
    """Copy a tokenizer and the optional files beside it into `folder`."""
    shutil.copyfile(tokenizer, folder / TOKENIZER)
    for name in _COMPANIONS:
        if tokenizer.with_name(name).is_file():
            shutil.copyfile(tokenizer.with_name(name), folder / name)


def describe_tokenizer(folder: Path, num_positions: int, eod_token: str) -> dict[str, int]:
    """Make the copied tokenizer loadable by transformers; the ids of its special tokens, for `config.json`.

    Without a `tokenizer_config.json`, the end-of-document token is also BOS and EOS, as in GPT-2. It is the padding
    token too, since Trainer wants one; not in `config.json`, which would freeze its embedding.
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
    """Whether a tokenizer has an end-of-document token. Raises TokenizerError for an invalid file."""
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
