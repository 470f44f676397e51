"""Writes Hugging Face folders: safetensors files, a tensor at a time.

A safetensors file is an 8-byte length, a JSON header with every tensor's place, and the bytes; names and shapes are
known before the values, so the header is written first. Imports torch only to write.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fp8.checkpoint.manifest import sync
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf.mapping import Shape
from megatron_fp8.hf.weights import INDEX, SINGLE_FILE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_DTYPES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}
_ALIGNMENT_BYTES = 8


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
