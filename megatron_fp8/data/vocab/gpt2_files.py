"""Owns GPT-2's two files, a vocabulary in JSON and a list of merges, as one `tokenizer.json`."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from megatron_fp8.data.vocab.backend import END_OF_DOCUMENT, TokenizerError


def convert_gpt2_files(vocabulary: Path, merges: Path, eod_token: str | None, path: Path) -> None:
    """Write the tokenizer of the two to `path`; `eod_token` (None: `<|endoftext|>`) becomes special.

    A file that holds the same is left as it is. Raises TokenizerError where a file is none, or `path` holds another.
    """
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the library raises a bare Exception for every kind of damage
        raise TokenizerError(
            f"{vocabulary} and {merges} are not GPT-2's vocabulary and merges: {error}", "name the two whole files"
        ) from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    name = eod_token or END_OF_DOCUMENT
    if name in backend.get_vocab():
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False)])
    if path.exists():
        if not path.is_file() or _content(path) != json.loads(backend.to_str()):
            raise TokenizerError(
                f"{path} exists and is not the tokenizer of {vocabulary} and {merges}", "name another file to write"
            )
        return
    temporary = Path(f"{path}.incomplete")
    backend.save(str(temporary))
    temporary.replace(path)


def _content(path: Path) -> object:
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return content
