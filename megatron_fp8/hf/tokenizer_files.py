"""The tokenizer files of a Hugging Face folder, and that they agree with the run. Imports no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from megatron_fp8.data.tokenizer import HUGGING_FACE, Tokenizer, TokenizerError
from megatron_fp8.data.tokenizer_kinds import EOD
from megatron_fp8.errors import BadInputError

TOKENIZER = "tokenizer.json"
_CONFIG, _MAP, _TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


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
    for name in (_CONFIG, _MAP, _TEMPLATE):
        if tokenizer.with_name(name).is_file():
            shutil.copyfile(tokenizer.with_name(name), folder / name)


def describe_tokenizer(
    folder: Path, num_positions: int, eod_token: str | None, vocab_size: int
) -> tuple[dict[str, int], list[str]]:
    """Make the copied tokenizer that of a model of `vocab_size` tokens, whose documents end as the run's.

    What transformers takes for the end of a text must be what ended documents, or generation never stops; and every
    token that it knows must be in the tokenizer, since it would give others an id outside the model's table.
    Returns the ids for `config.json`, and notes. The padding token, which Trainer wants, is in `generation_config.json`
    alone: in `config.json` it would freeze its embedding. BadInputError where the end of a document has no embedding.
    """
    ids = _vocabulary(folder / TOKENIZER)
    eod_id = Tokenizer.load(folder / TOKENIZER, HUGGING_FACE, eod_token).eod_id
    if eod_id >= vocab_size:
        raise BadInputError(f"documents end with id {eod_id}, but the model has {vocab_size} tokens: another tokenizer")
    eod_token = next(token for token, number in ids.items() if number == eod_id)
    known = {token: number for token, number in ids.items() if number < vocab_size}
    before = _roles(folder)
    roles = {name: token for name, token in before.items() if token in known}
    notes = [
        f"{name} {token!r} has no embedding, and is left out" for name, token in before.items() if token not in known
    ]
    if before.get("eos_token", eod_token) != eod_token:
        notes.append(f"eos_token is {eod_token!r}, which ends documents in the run; it was {before['eos_token']!r}")
    if not before:
        roles["bos_token"] = eod_token
    roles |= {"eos_token": eod_token, "pad_token": roles.get("pad_token", eod_token)}
    _write_config(folder, roles, known, num_positions)
    found = {f"{name}_id": known[roles[name]] for name in ("bos_token", "eos_token") if name in roles}
    generation = {**found, "pad_token_id": known[roles["pad_token"]]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    return found, notes


def _roles(folder: Path) -> dict[str, str]:
    """Special tokens by their roles, as transformers reads them."""
    found = {}
    for file in (_MAP, _CONFIG):
        settings = _json(folder / file) if (folder / file).is_file() else {}
        for name in _ROLES:
            token = settings.get(name)
            content = token.get("content") if isinstance(token, Mapping) else token
            if isinstance(content, str):
                found[name] = content
    return found


def _write_config(folder: Path, roles: Mapping[str, str], known: Mapping[str, int], num_positions: int) -> None:
    path = folder / _CONFIG
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": num_positions,
        "clean_up_tokenization_spaces": False,
    }
    if path.is_file():
        settings = _json(path)
    for name in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(settings.get(name), list):
            settings[name] = [token for token in settings[name] if _content(token) in known]
    if isinstance(added := settings.get("added_tokens_decoder"), dict):
        settings["added_tokens_decoder"] = {key: token for key, token in added.items() if _content(token) in known}
    settings = {key: value for key, value in settings.items() if key not in _ROLES} | dict(roles)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    # All that it says is in the config now.
    (folder / _MAP).unlink(missing_ok=True)


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, Mapping) else token


def _json(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInputError(f"{path} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise BadInputError(f"{path} is not a JSON object")
    return settings


def ends_documents(tokenizer: Path) -> bool:
    """Whether a tokenizer has an end-of-document token. Raises TokenizerError for an invalid file."""
    try:
        Tokenizer.load(tokenizer)
    except TokenizerError as error:
        if error.key != EOD:
            raise
        return False
    return True


def require_embeddings(tokenizer: Path, vocab_size: int) -> None:
    """BadInputError for a tokenizer with ids outside the model's table, which no config can put right."""
    size = max(_vocabulary(tokenizer).values()) + 1
    if size > vocab_size:
        raise BadInputError(
            f"{tokenizer} has {size} tokens, but the model has embeddings for {vocab_size}: use the model's own with "
            "--tokenizer FILE; or give the model more with transformers' model.resize_token_embeddings(len(tokenizer)) "
            "and save_pretrained; or --no-tokenizer"
        )


def _vocabulary(tokenizer: Path) -> dict[str, int]:
    try:
        ids: dict[str, int] = tokenizers.Tokenizer.from_file(str(tokenizer)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises a bare Exception for every kind of error
        raise BadInputError(f"{tokenizer} is not a tokenizer.json of the tokenizers library: {error}") from error
    return ids
