"""Readers of what the views wrote, independent of the writers' code of this project."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32768
_FILE_HEADER_BYTES = 7
_CHUNK_HEADER = struct.Struct("<IHB")


def wandb_messages(path: Path) -> Iterator[Any]:
    """The records of a `.wandb` file: a log in LevelDB's format: chunks that are 1 full, 2 first, 3 middle, 4 last."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, message = _FILE_HEADER_BYTES, b""
    while position + _CHUNK_HEADER.size <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _CHUNK_HEADER.size:
            position += left
            continue
        _, length, kind = _CHUNK_HEADER.unpack_from(data, position)
        if kind == 0:  # the rest of a block that was not used
            break
        position += _CHUNK_HEADER.size
        message += data[position : position + length]
        position += length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            yield record
            message = b""


def only_wandb_file(directory: Path) -> Path:
    """The one `.wandb` file below a directory."""
    (path,) = directory.rglob("*.wandb")
    return path


def wandb_history(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's history in their order, without wandb's own run time."""
    rows = []
    for record in wandb_messages(path):
        if record.WhichOneof("record_type") == "history":
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            row.pop("_runtime", None)
            rows.append(row)
    return rows


def tensorboard_scalars(directory: Path) -> dict[str, list[tuple[int, float, float]]]:
    """(step, time, value) by tag, as TensorBoard itself reads a directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.wall_time, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }
