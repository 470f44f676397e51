"""Finds the weights of a Hugging Face folder: which files hold them, and what is in their headers. Imports no torch.

A folder that holds two sets of weights is refused, since one of them is stale and nothing says which; where
`transformers` leaves files alone, so does this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron_fp8.config.problem import first_few
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf.mapping import Shape, TensorGroup

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_SUPPORTED = ("BF16", "F16", "F32")
# Buffers that transformers before version 5 saved: causal masks, RoPE's frequencies.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
_PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class StoredWeight:
    """A tensor in a safetensors file; `name` is its name there, `dtype` is spelled as safetensors does."""

    file: Path
    name: str
    shape: Shape
    dtype: str


def read_folder(folder: Path) -> dict[str, StoredWeight]:
    """All tensors of a folder by name.

    BadInputError if there are none or two sets of them, or a file is missing, corrupt, or not what the index says.
    """
    places = _places(folder)
    weights: dict[str, StoredWeight] = {}
    wrong = []
    for file in sorted(set(places.values()) if places else [SINGLE_FILE]):
        for weight in _header(folder / file):
            if weight.name in weights:
                wrong.append(f"{weight.name} is in {weights[weight.name].file.name} and in {file}")
            elif places and places.get(weight.name) != file:
                wrong.append(f"{weight.name} is in {file}; {INDEX} says {places.get(weight.name, 'nothing of it')}")
            weights[weight.name] = weight
    wrong += [f"{name} is not in {file}, where {INDEX} has it" for name, file in places.items() if name not in weights]
    if wrong:
        raise BadInputError(
            f"{folder} holds weights that contradict each other:\n  {first_few(wrong, chr(10) + '  ', 8)}\n"
            "  use: the folder as it was published or saved, in full"
        )
    return weights


def _header(file: Path) -> Iterator[StoredWeight]:
    try:
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                piece = opened.get_slice(name)
                yield StoredWeight(file, name, tuple(piece.get_shape()), piece.get_dtype())
    except (OSError, SafetensorError) as error:
        raise BadInputError(f"{file} cannot be read: {error}") from error


def unread_files(folder: Path) -> list[str]:
    """Other files with weights, which are left alone, as transformers leaves them."""
    read = {SINGLE_FILE, *_places(folder).values()}
    found = (path.name for pattern in ("*.safetensors", *_PICKLES) for path in folder.glob(pattern))
    return sorted(name for name in found if name not in read and name != "training_args.bin")


def find_weights(folder: Path, groups: Iterable[TensorGroup], tied_head: str | None) -> dict[str, StoredWeight]:
    """The tensors of a folder by their names in `groups`.

    `tied_head`: the head's name where it is the embedding: it may be stored too, or in its place. A base model's names,
    which lack the first part, are accepted. BadInputError with everything that is missing, has another shape or format,
    or is not part of the model.
    """
    stored = read_folder(folder)
    groups = list(groups)
    embedding = groups[0].theirs[0]
    if tied_head in stored and embedding not in stored and embedding.partition(".")[2] not in stored:
        stored[embedding] = stored.pop(tied_head)
    found, wrong = {}, []
    for name, shape in ((name, shape) for group in groups for name, shape in group.their_shapes.items()):
        weight = stored.pop(name, None) or stored.pop(name.partition(".")[2], None)
        if weight is None:
            wrong.append(f"{name} is missing")
        elif weight.shape != shape:
            wrong.append(f"{name} has shape {list(weight.shape)}; config.json makes it {list(shape)}")
        elif weight.dtype not in _SUPPORTED:
            wrong.append(f"{name} is in {weight.dtype}; only {', '.join(_SUPPORTED)} are supported")
        else:
            found[name] = weight
    if tied_head in stored:
        found[tied_head] = stored.pop(tied_head)
    wrong += [f"{name} is not part of the model" for name in stored if not name.endswith(_BUFFERS)]
    if wrong:
        shown = first_few(wrong, "\n  ", 8)
        raise BadInputError(f"{folder} does not hold the model in its config.json:\n  {shown}")
    return found


def _places(folder: Path) -> dict[str, str]:
    """File of each tensor by the index; empty for a single file. BadInputError for none, two sets, or missing files."""
    index, single = folder / INDEX, folder / SINGLE_FILE
    shards = {path.name for path in folder.glob("*.safetensors") if _SHARD.fullmatch(path.name)}
    if (folder / "adapter_config.json").is_file():
        raise BadInputError(
            f"{folder} holds an adapter (adapter_config.json), which changes the model: merge it with peft's "
            "merge_and_unload and save_pretrained first"
        )
    if single.is_file() and (index.is_file() or shards):
        others = INDEX if index.is_file() else first_few(sorted(shards))
        raise BadInputError(
            f"{folder} holds two sets of weights, {SINGLE_FILE} and {others}, and nothing says which counts: delete "
            "the stale one"
        )
    if index.is_file():
        places = _read_index(index)
        if missing := sorted(file for file in set(places.values()) if not (folder / file).is_file()):
            raise BadInputError(f"{folder} lacks {first_few(missing)}, named in {INDEX}: download or copy it in full")
        if extra := sorted(shards - set(places.values())):
            raise BadInputError(
                f"{folder} holds two sets of weights, those of {INDEX} and {first_few(extra)}, which it does not name: "
                "delete the stale ones"
            )
        return places
    if single.is_file():
        return {}
    other = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    hint = f"; {other[0]} is a pickle: save the model with transformers' save_pretrained first" if other else ""
    hint += f"; there are shards, {first_few(sorted(shards))}, without their index" if shards else ""
    raise BadInputError(f"{folder} has neither {SINGLE_FILE} nor {INDEX}{hint}")


def _read_index(index: Path) -> dict[str, str]:
    try:
        places = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        outside = [file for file in places.values() if Path(file).name != file]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInputError(f"{index} cannot be read: {error!r}") from error
    if outside:
        raise BadInputError(f"{index} names {outside[0]!r}, which is outside its folder")
    return places
