"""Owns what a Hugging Face folder holds: its safetensors files' tensors, and whether they are those of a model.

Headers are read, no values. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron_fp8.errors import BadInputError
from megatron_fp8.hf.groups import Shape, TensorGroup

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
TIED_HEAD = "lm_head.weight"
_DTYPES = ("BF16", "F16", "F32")
# Buffers that programs before transformers 5 saved: the causal mask, RoPE's frequencies.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_MOST_SHOWN = 8


@dataclass(frozen=True)
class StoredWeight:
    """A tensor in a safetensors file; `name` is the one it has there, `dtype` in safetensors' words."""

    file: Path
    name: str
    shape: Shape
    dtype: str


def read_folder(folder: Path) -> dict[str, StoredWeight]:
    """All tensors of a folder by name. BadInputError where there are none, or a file is missing or damaged."""
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
    """The tensors of a folder by the names that `groups` give them; a head that is `tied` may be there as well.

    A base model's names, without the first part, will do too. BadInputError with everything that is missing, of
    another shape or format, or not part of the model.
    """
    stored = read_folder(folder)
    found, wrong = {}, []
    for name, shape in ((name, shape) for group in groups for name, shape in group.their_shapes.items()):
        weight = stored.pop(name, None) or stored.pop(name.partition(".")[2], None)
        if weight is None:
            wrong.append(f"{name} is not there")
        elif weight.shape != shape:
            wrong.append(f"{name} has shape {list(weight.shape)}; config.json makes it {list(shape)}")
        elif weight.dtype not in _DTYPES:
            wrong.append(f"{name} is in {weight.dtype}; only {', '.join(_DTYPES)} are converted")
        else:
            found[name] = weight
    if tied and TIED_HEAD in stored:
        found[TIED_HEAD] = stored.pop(TIED_HEAD)
    wrong += [f"{name} is no part of the model" for name in stored if not name.endswith(_BUFFERS)]
    if wrong:
        more = f"\n  and {len(wrong) - _MOST_SHOWN} more" if len(wrong) > _MOST_SHOWN else ""
        raise BadInputError(
            f"{folder} does not hold the model of its config.json:\n  " + "\n  ".join(wrong[:_MOST_SHOWN]) + more
        )
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
            raise BadInputError(f"{index} names {outside[0]!r}, which is outside of its folder")
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    hint = f"; {other[0]} is a pickle: save the model with transformers' save_pretrained first" if other else ""
    raise BadInputError(f"{folder} has neither {SINGLE_FILE} nor {INDEX}{hint}")
