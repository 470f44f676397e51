"""Owns the way from a checkpoint to a Hugging Face folder, a tensor at a time. Weights are the FP32 masters.

Must not know command lines or displays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fp8.checkpoint.manifest import CheckpointError, find_corruption
from megatron_fp8.checkpoint.plain_index import MASTER
from megatron_fp8.checkpoint.saved_model import kept_checkpoint, read_config
from megatron_fp8.config.schema import Config
from megatron_fp8.data.tokenizer import AUTO, END_OF_DOCUMENT, HUGGING_FACE, Tokenizer
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf.families import config_json, tensor_groups
from megatron_fp8.hf.groups import TensorGroup
from megatron_fp8.hf.tokenizer_files import TOKENIZER, copy_tokenizer, describe_tokenizer, require_tokenizer
from megatron_fp8.hf.workplace import new_folder, require_new

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_fp8.checkpoint.tensor_files import TensorReader

_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class ExportSettings:
    """How to export.

    `dtype`: fp32, bf16 or fp16; None: the format of the run's parameters. `max_shard_bytes`: of a safetensors file.
    `tokenizer`: a `tokenizer.json` in the place of the run's; `with_tokenizer` False: none is written. `verify`: read
    every byte of the checkpoint first; False: sizes are compared.
    """

    dtype: str | None = None
    max_shard_bytes: int = 5 * 10**9
    tokenizer: Path | None = None
    with_tokenizer: bool = True
    verify: bool = True


@dataclass(frozen=True)
class Exported:
    """What was written: format, bytes of the weights, and what a person should know."""

    checkpoint: Path
    dtype: str
    num_bytes: int
    notes: tuple[str, ...]


def export_checkpoint(
    path: Path, folder: Path, settings: ExportSettings, on_tensor: Callable[[str, int], None]
) -> Exported:
    """Write the model of the checkpoint that `path` means into the new `folder`.

    `on_tensor` is told each tensor of ours that was written, and how many there are. Raises BadInputError or
    CheckpointError, and leaves nothing behind, when the checkpoint is corrupt or of a model that cannot be expressed.
    """
    require_new(folder)
    with kept_checkpoint(path) as checkpoint:
        return _export(checkpoint, folder, settings, on_tensor)


def _export(
    checkpoint: Path, folder: Path, settings: ExportSettings, on_tensor: Callable[[str, int], None]
) -> Exported:
    config = read_config(checkpoint)
    tokenizer = _tokenizer(config, settings) if settings.with_tokenizer else None
    # Every key that cannot be expressed, before a byte of the weights is read.
    config_json(config.model, vocab_size=1)
    problems = list(find_corruption(checkpoint, contents=settings.verify))
    if problems:
        raise CheckpointError(f"the checkpoint is corrupt: {'; '.join(problems)}")

    from megatron_fp8.checkpoint.tensor_files import TensorReader
    from megatron_fp8.hf.shards import DTYPES, write_shards

    reader = TensorReader(checkpoint)
    embedding = reader.index.get(MASTER + _EMBEDDING)
    if embedding is None:
        raise CheckpointError(f"{checkpoint} holds no {MASTER}{_EMBEDDING}: it is no checkpoint of a model")
    vocab_size = embedding.shape[0]
    groups = list(tensor_groups(config.model, vocab_size))
    _require_tensors(checkpoint, reader, groups)
    dtype = settings.dtype or _parameters_dtype(config)
    description = config_json(config.model, vocab_size)
    with new_folder(folder) as place:
        if tokenizer is not None:
            copy_tokenizer(tokenizer, place)
            num_positions = config.model.max_position_embeddings or config.model.seq_length
            description |= describe_tokenizer(place, num_positions, config.data.eod_token or END_OF_DOCUMENT)
        description["torch_dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
        (place / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        shapes = {name: shape for group in groups for name, shape in group.their_shapes.items()}
        tensors = _tensors(reader, groups, on_tensor)
        num_bytes = write_shards(place, shapes, DTYPES[dtype], settings.max_shard_bytes, tensors)
    return Exported(checkpoint, dtype, num_bytes, tuple(_notes(config)))


def _tokenizer(config: Config, settings: ExportSettings) -> Path:
    if settings.tokenizer is not None:
        return require_tokenizer(settings.tokenizer, "--tokenizer")
    if config.data.tokenizer_model is None and config.data.tokenizer_type == AUTO:
        raise BadInputError("the run has no data.tokenizer_model: use --tokenizer FILE, or --no-tokenizer")
    if config.data.tokenizer_model is not None and not Path(config.data.tokenizer_model).exists():
        return require_tokenizer(Path(config.data.tokenizer_model), "--tokenizer")
    tokenizer = Tokenizer.of(config.data)
    if tokenizer.path is None or tokenizer.tokenizer_type != HUGGING_FACE:
        raise BadInputError(
            f"the run's tokenizer is a {tokenizer.tokenizer_type}, which does not become a {TOKENIZER}: name one of "
            "the same tokens with --tokenizer FILE, or say --no-tokenizer"
        )
    return Path(tokenizer.path)


def _require_tensors(checkpoint: Path, reader: TensorReader, groups: Sequence[TensorGroup]) -> None:
    wrong = []
    for name, shape in ((MASTER + name, shape) for group in groups for name, shape in group.our_shapes.items()):
        stored = reader.index.get(name)
        if stored is None:
            wrong.append(f"{name} is not there")
        elif stored.shape != shape:
            wrong.append(f"{name} has shape {list(stored.shape)}; its config makes it {list(shape)}")
    if wrong:
        raise CheckpointError(f"{checkpoint} does not hold the model of its config: {'; '.join(wrong[:5])}")


def _tensors(
    reader: TensorReader, groups: Sequence[TensorGroup], on_tensor: Callable[[str, int], None]
) -> Iterator[tuple[str, Tensor]]:
    from megatron_fp8.hf.reorder import to_theirs

    for group in groups:
        ours = [reader.read(MASTER + name) for name in group.ours]
        theirs = to_theirs(group, ours)
        del ours
        for name in group.theirs:
            yield name, theirs.pop(0)
        on_tensor(group.ours[0], len(groups))


def _parameters_dtype(config: Config) -> str:
    mode = config.precision.mode
    return mode if mode in ("fp32", "fp16") else "bf16"


def _notes(config: Config) -> Iterator[str]:
    model = config.model
    if model.position_embedding_type == "rope" and model.hidden_dropout:
        yield f"model.hidden_dropout={model.hidden_dropout} is left out: Llama has no such dropout"
