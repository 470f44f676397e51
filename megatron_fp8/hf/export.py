"""Exports a checkpoint's FP32 master weights as a Hugging Face folder, a tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fp8.checkpoint.manifest import CheckpointError, find_corruption
from megatron_fp8.checkpoint.plain_index import MASTER
from megatron_fp8.checkpoint.saved_model import kept_checkpoint, read_config
from megatron_fp8.config.problem import first_few
from megatron_fp8.config.schema import Config
from megatron_fp8.data.tokenizer import AUTO, HUGGING_FACE, Tokenizer
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf import family_for
from megatron_fp8.hf.family import Family
from megatron_fp8.hf.folder import new_folder, require_new, write_shards
from megatron_fp8.hf.mapping import HFSettings, OnTensor, TensorGroup, to_theirs
from megatron_fp8.hf.tokenizer_files import TOKENIZER, copy_tokenizer, describe_tokenizer, require_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_fp8.checkpoint.tensor_files import TensorReader

_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class ExportSettings:
    """How to export.

    `dtype`: fp32, bf16 or fp16; None: the format of the run's parameters. `max_shard_bytes`: of a safetensors file.
    `tokenizer`: a `tokenizer.json` instead of the run's; `with_tokenizer` False: none is written. `verify`: read every
    byte of the checkpoint first; False: compare sizes only.
    """

    dtype: str | None = None
    max_shard_bytes: int = 5 * 10**9
    tokenizer: Path | None = None
    with_tokenizer: bool = True
    verify: bool = True


@dataclass(frozen=True)
class Exported:
    """What was written: format and bytes of the weights, and notes for the user."""

    checkpoint: Path
    dtype: str
    num_bytes: int
    notes: tuple[str, ...]


def export_checkpoint(path: Path, folder: Path, settings: ExportSettings, on_tensor: OnTensor) -> Exported:
    """Write the model of the checkpoint that `path` means into the new `folder`.

    Raises BadInputError or
    CheckpointError, leaving nothing behind, if the checkpoint is corrupt or its model cannot be expressed.
    """
    require_new(folder)
    with kept_checkpoint(path) as checkpoint:
        return _export(checkpoint, folder, settings, on_tensor)


def _export(checkpoint: Path, folder: Path, settings: ExportSettings, on_tensor: OnTensor) -> Exported:
    config = read_config(checkpoint)
    tokenizer = _tokenizer(config, settings) if settings.with_tokenizer else None
    # Every key that cannot be expressed, before a byte of the weights is read.
    family = family_for(config.model)
    problems = list(find_corruption(checkpoint, contents=settings.verify))
    if problems:
        raise CheckpointError(f"the checkpoint is corrupt: {'; '.join(problems)}")

    import torch

    from megatron_fp8.checkpoint.tensor_files import TensorReader

    reader = TensorReader(checkpoint)
    embedding = reader.index.get(MASTER + _EMBEDDING)
    if embedding is None:
        raise CheckpointError(f"{checkpoint} has no {MASTER}{_EMBEDDING}: it is not a checkpoint of a model")
    vocab_size = embedding.shape[0]
    groups = list(family.tensor_groups(config.model, vocab_size))
    _require_tensors(checkpoint, reader, groups)
    mode = config.precision.mode
    dtype = settings.dtype or (mode if mode in ("fp32", "fp16") else "bf16")
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    description = family.config_json(config.model, vocab_size)
    notes = list(_notes(config, family))
    with new_folder(folder) as place:
        if tokenizer is not None:
            copy_tokenizer(tokenizer, place)
            num_positions = config.model.max_position_embeddings or config.model.seq_length
            ids, of_tokenizer = describe_tokenizer(place, num_positions, config.data.eod_token, vocab_size)
            description |= ids
            notes += of_tokenizer
        description["torch_dtype"] = str(torch_dtype).removeprefix("torch.")
        (place / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        shapes = {name: shape for group in groups for name, shape in group.their_shapes.items()}
        tensors = _tensors(reader, groups, on_tensor)
        num_bytes = write_shards(place, shapes, torch_dtype, settings.max_shard_bytes, tensors)
    return Exported(checkpoint, dtype, num_bytes, tuple(notes))


def _tokenizer(config: Config, settings: ExportSettings) -> Path:
    data = config.data
    if settings.tokenizer is not None:
        return require_tokenizer(settings.tokenizer)
    if data.tokenizer_model is None and data.tokenizer_type == AUTO:
        raise BadInputError("the run has no data.tokenizer_model: use --tokenizer FILE, or --no-tokenizer")
    if data.tokenizer_model is not None and not Path(data.tokenizer_model).exists():
        return require_tokenizer(Path(data.tokenizer_model))
    tokenizer = Tokenizer.of(data)
    if tokenizer.path is None or tokenizer.tokenizer_type != HUGGING_FACE:
        raise BadInputError(
            f"the run's tokenizer is a {tokenizer.tokenizer_type}, which cannot become a {TOKENIZER}: use --tokenizer "
            "FILE with one of the same tokens, or --no-tokenizer"
        )
    return Path(tokenizer.path)


def _require_tensors(checkpoint: Path, reader: TensorReader, groups: Sequence[TensorGroup]) -> None:
    wrong = []
    for name, shape in ((MASTER + name, shape) for group in groups for name, shape in group.our_shapes.items()):
        stored = reader.index.get(name)
        if stored is None:
            wrong.append(f"{name} is missing")
        elif stored.shape != shape:
            wrong.append(f"{name} has shape {list(stored.shape)}; its config makes it {list(shape)}")
    if wrong:
        raise CheckpointError(f"{checkpoint} does not hold the model in its config: {first_few(wrong, '; ')}")


def _tensors(reader: TensorReader, groups: Sequence[TensorGroup], on_tensor: OnTensor) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(groups, 1):
        theirs = to_theirs(group, [reader.read(MASTER + name) for name in group.ours])
        for name in group.theirs:
            yield name, theirs.pop(0)
        on_tensor(group.ours[0], len(groups), number)


def _notes(config: Config, family: Family) -> Iterator[str]:
    model = config.model
    if model.hf_model_type not in (None, family.model_type):
        yield f"{model.hf_model_type} cannot hold this model: exported as {family.model_type}"
    settings = HFSettings(family.config_json(model, 1), family.architecture)
    kept = family.values(settings).get("hidden_dropout", 0.0)
    if kept != model.hidden_dropout:
        yield f"model.hidden_dropout={model.hidden_dropout} is left out: {family.architecture} has no hidden dropout"
