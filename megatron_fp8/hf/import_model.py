"""Imports a Hugging Face folder as a checkpoint to start a run from, a tensor at a time.

Written are the FP32 master weights, which hold BF16 and FP16 weights exactly, a config to fine-tune with, and the
tokenizer. One process writes, without a process group.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fp8 import __version__
from megatron_fp8.checkpoint.directory import CHECKPOINTS, CheckpointDirectory
from megatron_fp8.checkpoint.manifest import Manifest, write_sums
from megatron_fp8.checkpoint.plain_index import MASTER
from megatron_fp8.config.load import dump_config
from megatron_fp8.config.problem import first_few
from megatron_fp8.config.schema import Config, ModelConfig
from megatron_fp8.errors import BadInputError
from megatron_fp8.hf import read_model
from megatron_fp8.hf.families import FAMILIES
from megatron_fp8.hf.folder import new_folder, require_new
from megatron_fp8.hf.mapping import OnTensor, TensorGroup, to_ours
from megatron_fp8.hf.tokenizer_files import (
    TOKENIZER,
    copy_tokenizer,
    ends_documents,
    require_embeddings,
    require_tokenizer,
)
from megatron_fp8.hf.weights import StoredWeight, find_weights, unread_files

if TYPE_CHECKING:
    from torch import Tensor

_MODES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


@dataclass(frozen=True)
class ImportSettings:
    """How to import.

    `seq_length`: tokens per sample of runs with it; None: all positions of the model. `tokenizer`: a `tokenizer.json`
    instead of the folder's; `with_tokenizer` False: none is copied.
    """

    seq_length: int | None = None
    tokenizer: Path | None = None
    with_tokenizer: bool = True


@dataclass(frozen=True)
class Imported:
    """What was written: the config to start from, the number of parameters, and notes for the user."""

    config: Path
    num_parameters: int
    notes: tuple[str, ...]


def import_folder(source: Path, out: Path, settings: ImportSettings, on_tensor: OnTensor) -> Imported:
    """Write the model of a Hugging Face folder into the new folder `out`, as a checkpoint of iteration 0.

    Raises BadInputError, leaving nothing behind, for a model that is not supported or a folder that is incomplete.
    """
    require_new(out)
    if not source.is_dir():
        raise BadInputError(f"{source} is not a folder: use one with config.json and model.safetensors")
    notes: list[str] = []
    model = read_model(source / "config.json", settings.seq_length, notes)
    assert model.vocab_size is not None
    assert model.hf_model_type is not None
    family = FAMILIES[model.hf_model_type]
    groups = list(family.tensor_groups(model, model.vocab_size))
    tied_head = family.tied_head(model)
    weights = find_weights(source, groups, tied_head)
    tokenizer = None
    if settings.with_tokenizer:
        tokenizer = require_tokenizer(settings.tokenizer or source / TOKENIZER)
        require_embeddings(tokenizer, model.vocab_size)
    config = _config(model, out, weights, tokenizer is not None)
    if tied_head in weights:
        _require_equal(weights[tied_head], weights[groups[0].theirs[0]])
    notes += [*_notes_on_files(source, weights), *_notes(tokenizer)]
    with new_folder(out) as place:
        if tokenizer is not None:
            copy_tokenizer(tokenizer, place)
        checkpoints = CheckpointDirectory(place / CHECKPOINTS)
        if nonfinite := _write_checkpoint(checkpoints, config, groups, weights, on_tensor):
            notes.append(f"NaN or infinite weights, kept as they are: {first_few(nonfinite)}")
        (place / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    shapes = [shape for group in groups for shape in group.our_shapes.values()]
    return Imported(out / "config.yaml", sum(math.prod(shape) for shape in shapes), tuple(notes))


def _write_checkpoint(
    checkpoints: CheckpointDirectory,
    config: Config,
    groups: Sequence[TensorGroup],
    weights: Mapping[str, StoredWeight],
    on_tensor: OnTensor,
) -> list[str]:
    """Write the weights; the names of those that are not finite."""
    from megatron_fp8.checkpoint.tensor_files import NewPiece, write_index, write_pieces

    directory = checkpoints.begin(0)
    written, nonfinite = [], []
    for number, group in enumerate(groups):
        (name, shape), *_ = group.our_shapes.items()
        theirs = [_read(weights[name]) for name in group.theirs]
        nonfinite += [name for name, tensor in zip(group.theirs, theirs, strict=True) if not tensor.isfinite().all()]
        (tensor,) = to_ours(group, theirs)
        # A file each: the ranks that load share the files.
        piece = NewPiece(MASTER + name, shape, (0,) * len(shape), tensor.float())
        written += write_pieces(directory / f"__0_{number}.distcp", [piece])
        del theirs, tensor, piece
        on_tensor(name, len(groups), number + 1)
    write_index(directory, written)
    write_sums(directory, 0, sorted(path.name for path in directory.iterdir()))
    checkpoints.commit(
        Manifest(
            iteration=0,
            config=dump_config(config),
            layout={"world_size": 1},
            counters={},
            versions={"megatron-fp8": __version__, **{name: version(name) for name in ("torch", "safetensors")}},
            written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
    )
    return nonfinite


def _config(model: ModelConfig, out: Path, weights: Mapping[str, StoredWeight], with_tokenizer: bool) -> Config:
    """A config to fine-tune with; what the model does not determine is a modest start."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", out.absolute().name).lstrip("._-") or "model"
    return Config.model_validate(
        {
            "run": {"name": f"{name}-finetuned"},
            "model": model.model_dump(),
            "precision": {"mode": _MODES[_main_dtype(weights)]},
            "training": {"micro_batch_size": 1, "global_batch_size": 8, "train_iters": 1000, "eval_iters": 0},
            "optimizer": {"lr": 1e-5, "min_lr": 1e-6, "lr_warmup_iters": 100},
            "data": {"tokenizer_model": str(out.absolute() / TOKENIZER) if with_tokenizer else None},
            "checkpoint": {"load": str(out.absolute()), "load_weights_only": True},
        }
    )


def _main_dtype(weights: Mapping[str, StoredWeight]) -> str:
    """The format of most of the weights: norms are often kept in FP32 beside matrices in BF16."""
    sizes: Counter[str] = Counter()
    for weight in weights.values():
        sizes[weight.dtype] += math.prod(weight.shape)
    return sizes.most_common(1)[0][0]


def _notes_on_files(source: Path, weights: Mapping[str, StoredWeight]) -> Iterator[str]:
    main = _main_dtype(weights)
    others = sorted(f"{name} ({weight.dtype})" for name, weight in weights.items() if weight.dtype != main)
    if others:
        what = f"weights are in {main} but for {first_few(others)}"
        yield f"{what}: precision.mode is {_MODES[main]}, and the checkpoint holds all exactly"
    if unread := unread_files(source):
        yield f"not read, as transformers does not read them: {first_few(unread)}"


def _read(weight: StoredWeight) -> Tensor:
    from safetensors import safe_open

    # Opened for each tensor: an open file keeps the pages that were read from it in memory.
    with safe_open(weight.file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(weight.name)
    return tensor


def _require_equal(head: StoredWeight, embedding: StoredWeight) -> None:
    """A tied head that is stored must equal the embedding."""
    import torch

    if not torch.equal(_read(head), _read(embedding)):
        raise BadInputError(
            f"config.json says tie_word_embeddings=true, but {head.name} in {head.file} differs from {embedding.name}"
        )


def _notes(tokenizer: Path | None) -> list[str]:
    if tokenizer is None:
        return ["there is no tokenizer: set data.tokenizer_model before training"]
    if not ends_documents(tokenizer):
        return [
            "the tokenizer has neither <|endoftext|> nor an end token to separate documents: set data.eod_token, or "
            f"add one to added_tokens in {TOKENIZER}, before preparing data with it"
        ]
    return []
