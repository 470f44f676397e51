"""Reads and writes Hugging Face folders: safetensors files, a tensor at a time, and tokenizer files.

A safetensors file is an 8-byte length, a JSON header with every tensor's place, and the bytes; names and shapes are
known before the values, so the header is written first. Reading looks at headers alone. Imports torch only to write.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from megatron_fp8.checkpoint.manifest import sync
from megatron_fp8.config.problem import first_few
from megatron_fp8.data.tokenizer import Tokenizer, TokenizerError
from megatron_fp8.data.tokenizer_kinds import EOD
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf.mapping import Shape, TensorGroup

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
TIED_HEAD = "lm_head.weight"
TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
# Optional files that belong to a tokenizer.
_COMPANIONS = (_TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja")
_DTYPES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}
_ALIGNMENT_BYTES = 8
# Buffers that transformers before version 5 saved: the causal mask, RoPE's frequencies.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class StoredWeight:
    """A tensor in a safetensors file; `name` is its name there, `dtype` is spelled as safetensors does."""

    file: Path
    name: str
    shape: Shape
    dtype: str


def read_folder(folder: Path) -> dict[str, StoredWeight]:
    """All tensors of a folder by name. BadInputError if there are none, or a file is missing or corrupt."""
    weights = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    piece = opened.get_slice(name)
                    weights[name] = StoredWeight(file, name, tuple(piece.get_shape()), piece.get_dtype())
        except (OSError, SafetensorError) as error:
            raise BadInputError(f"{file} cannot be read: {error}") from error
    return weights


def find_weights(folder: Path, groups: Iterable[TensorGroup], tied: bool) -> dict[str, StoredWeight]:
    """The tensors of a folder by their names in `groups`; a `tied` head may be stored, too.

    A base model's names, which lack the first part, are accepted. BadInputError with everything that is missing, has
    another shape or format, or is not part of the model.
    """
    stored = read_folder(folder)
    found, wrong = {}, []
    for name, shape in ((name, shape) for group in groups for name, shape in group.their_shapes.items()):
        weight = stored.pop(name, None) or stored.pop(name.partition(".")[2], None)
        if weight is None:
            wrong.append(f"{name} is missing")
        elif weight.shape != shape:
            wrong.append(f"{name} has shape {list(weight.shape)}; config.json makes it {list(shape)}")
        elif weight.dtype not in _DTYPES.values():
            wrong.append(f"{name} is in {weight.dtype}; only {', '.join(_DTYPES.values())} are supported")
        else:
            found[name] = weight
    if tied and TIED_HEAD in stored:
        found[TIED_HEAD] = stored.pop(TIED_HEAD)
    wrong += [f"{name} is not part of the model" for name in stored if not name.endswith(_BUFFERS)]
    if wrong:
        shown = first_few(wrong, "\n  ", 8)
        raise BadInputError(f"{folder} does not hold the model in its config.json:\n  {shown}")
    return found


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise BadInputError(f"{index} cannot be read: {error!r}") from error
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise BadInputError(f"{index} names {outside[0]!r}, which is outside its folder")
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    hint = f"; {other[0]} is a pickle: save the model with transformers' save_pretrained first" if other else ""
    raise BadInputError(f"{folder} has neither {SINGLE_FILE} nor {INDEX}{hint}")


def require_new(folder: Path) -> None:
    """BadInputError if `folder` exists, or its parent does not."""
    if folder.exists():
        raise BadInputError(f"{folder} exists, and nothing is overwritten: use a new folder")
    if not folder.absolute().parent.is_dir():
        raise BadInputError(f"{folder.absolute().parent}, the parent of {folder.name}, does not exist; create it first")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill under a hidden name; renamed to `folder` on success and removed on failure."""
    require_new(folder)
    temporary = folder.absolute().with_name(f".{folder.absolute().name}.incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.iterdir():
            sync(path)
        temporary.rename(folder)
        sync(folder.absolute().parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_shards(
    folder: Path, shapes: Mapping[str, Shape], dtype: torch.dtype, max_bytes: int, tensors: Iterable[tuple[str, Tensor]]
) -> int:
    """Write `tensors`, which arrive in the order of `shapes`, as `dtype` into files of at most `max_bytes`.

    A larger tensor gets its own file. Returns the bytes of all tensors. BadInputError for a number out of the range of
    `dtype`.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards = divide(sizes, max_bytes)
    files = [SINGLE_FILE]
    if len(shards) > 1:
        files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    coming = iter(tensors)
    for file, names in zip(files, shards, strict=True):
        with (folder / file).open("xb") as output:
            output.write(_header({name: shapes[name] for name in names}, dtype))
            for expected in names:
                name, tensor = next(coming)
                if name != expected or tuple(tensor.shape) != shapes[name]:
                    raise RuntimeError(f"{name} {list(tensor.shape)} arrived instead of {expected}")
                output.write(_bytes(name, tensor, dtype))
        sync(folder / file)
    total = sum(sizes.values())
    if len(shards) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def divide(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names in order, in groups whose sizes sum to at most `max_bytes`; a larger one is alone."""
    shards: list[list[str]] = []
    filled = max_bytes
    for name, size in sizes.items():
        if filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _header(shapes: Mapping[str, Shape], dtype: torch.dtype) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[str(dtype)], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _bytes(name: str, tensor: Tensor, dtype: torch.dtype) -> memoryview:
    """The tensor's bytes in `dtype`, rounded to nearest even."""
    import torch

    rounded = tensor.to(dtype).contiguous()
    if not torch.equal(rounded.isfinite(), tensor.isfinite()):
        largest = tensor.abs().max().item()
        raise BadInputError(f"{name} reaches {largest:.3g}, out of range of {str(dtype)[6:]}; use --dtype fp32 or bf16")
    return rounded.reshape(-1).view(torch.uint8).numpy().data


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
    path = folder / _TOKENIZER_CONFIG
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
