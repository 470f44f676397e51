"""Owns writing tensors into safetensors files one at a time, so that no more than one is in memory.

A file is an 8-byte length, a JSON header with every tensor's place, and the bytes (the safetensors format); names and
shapes are known before the values, so the header is written first. Must not know models.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_fp8.checkpoint.manifest import sync
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf.folder import INDEX, SINGLE_FILE
from megatron_fp8.hf.groups import Shape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT_BYTES = 8


def write_shards(
    folder: Path, shapes: Mapping[str, Shape], dtype: torch.dtype, max_bytes: int, tensors: Iterable[tuple[str, Tensor]]
) -> int:
    """Write `tensors`, which come in the order of `shapes`, as `dtype` into files of at most `max_bytes`.

    A tensor larger than that gets a file of its own. Returns the bytes of all tensors. BadInputError for a number that
    `dtype` does not reach.
    """
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.items()}
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
                    raise RuntimeError(f"{name} {list(tensor.shape)} came in the place of {expected}")
                output.write(_bytes(name, tensor, dtype))
        sync(folder / file)
    total = sum(sizes.values())
    if len(shards) > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def divide(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names in their order, in runs whose sizes sum to at most `max_bytes`; a larger one is alone."""
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
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _bytes(name: str, tensor: Tensor, dtype: torch.dtype) -> memoryview:
    """The tensor's bytes in `dtype`, rounded to nearest even."""
    rounded = tensor.to(dtype).contiguous()
    if not torch.equal(rounded.isfinite(), tensor.isfinite()):
        largest = tensor.abs().max().item()
        raise BadInputError(f"{name} reaches {largest:.3g}, more than {str(dtype)[6:]} holds; use --dtype fp32 or bf16")
    return rounded.reshape(-1).view(torch.uint8).numpy().data
