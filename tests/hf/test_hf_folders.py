"""Folders with two sets of weights, a tied head alone, mixed formats, and tokenizers that do not fit the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig

from megatron_fp8.errors import BadInputError
from megatron_fp8.hf.export import ExportSettings, export_checkpoint
from megatron_fp8.hf.import_model import ImportSettings, import_folder
from megatron_fp8.hf.tokenizer_files import describe_tokenizer
from megatron_fp8.prepare.train_tokenizer import train_bpe
from tests.hf.their_models import LLAMA, make_folder, weights_of

TEXT, NUM_TOKENS = ["for batch in data: loss = model(batch)"], 280
TURN = "<|im_end|>"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A folder in shards, with a tokenizer of as many tokens as the model has embeddings."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    make_folder(folder, {**LLAMA, "vocab_size": NUM_TOKENS, "tie_word_embeddings": True}, torch.bfloat16)
    train_bpe(TEXT, NUM_TOKENS, folder / "tokenizer.json")
    return folder


@pytest.fixture
def folder(source, tmp_path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "folder"))


def imported(folder: Path, out: Path, tokenizer: bool = False) -> tuple[str, ...]:
    """Notes of an import."""
    return import_folder(folder, out, ImportSettings(16, None, tokenizer), lambda *_: None).notes


def exported(checkpoint: Path, out: Path, **settings: Any) -> tuple[str, ...]:
    return export_checkpoint(checkpoint, out, ExportSettings(**settings), lambda *_: None).notes


def one_file(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Replace the weights by one file."""
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    save_file(weights, folder / "model.safetensors")


def refused(folder: Path, out: Path) -> str:
    with pytest.raises(BadInputError) as caught:
        imported(folder, out)
    assert not out.exists()
    return str(caught.value)


def test_two_sets_of_weights_are_refused_by_name(folder, tmp_path) -> None:
    weights = weights_of(folder)
    save_file({name: tensor * 2 for name, tensor in weights.items()}, folder / "model.safetensors")
    assert f"two sets of weights, model.safetensors and {INDEX}" in refused(folder, tmp_path / "out")
    (folder / INDEX).unlink()
    assert "two sets of weights, model.safetensors and model-0" in refused(folder, tmp_path / "out")


def test_a_shard_of_another_set_is_refused(folder, tmp_path) -> None:
    shutil.copy(next(folder.glob("model-00001-*")), folder / "model-00001-of-00099.safetensors")
    assert "and model-00001-of-00099.safetensors, which it does not name" in refused(folder, tmp_path / "out")


def test_missing_shards_are_all_named(folder, tmp_path) -> None:
    first, second, *_ = sorted(folder.glob("model-*"))
    first.unlink()
    second.unlink()
    assert f"lacks {first.name}, {second.name}, named in {INDEX}" in refused(folder, tmp_path / "out")


def test_an_index_that_its_shards_contradict_is_refused(folder, tmp_path) -> None:
    index = json.loads((folder / INDEX).read_text())
    names = list(index["weight_map"])
    other = next(name for name in names if index["weight_map"][name] != index["weight_map"][names[0]])
    index["weight_map"][names[0]] = index["weight_map"][other]
    (folder / INDEX).write_text(json.dumps(index))
    assert f"{names[0]} is in" in refused(folder, tmp_path / "out")


def test_an_adapter_is_refused(folder, tmp_path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert "merge_and_unload" in refused(folder, tmp_path / "out")


def test_files_that_transformers_leaves_alone_are_named(folder, tmp_path) -> None:
    for name in ("consolidated.safetensors", "pytorch_model.bin"):
        (folder / name).write_bytes(b"something else")
    (note,) = [note for note in imported(folder, tmp_path / "out") if "not read" in note]
    assert note.endswith("consolidated.safetensors, pytorch_model.bin")


def test_a_tied_model_that_stores_the_head_alone_is_whole(folder, tmp_path) -> None:
    weights = weights_of(folder)
    alone = {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in weights.items()}
    one_file(folder, alone)
    imported(folder, tmp_path / "in")
    exported(tmp_path / "in", tmp_path / "out", with_tokenizer=False)
    assert torch.equal(weights_of(tmp_path / "out")["model.embed_tokens.weight"], alone["lm_head.weight"])


def test_mixed_formats_and_nonfinite_weights_are_said(folder, tmp_path) -> None:
    weights = weights_of(folder)
    weights = {name: tensor.float() if "norm" in name else tensor for name, tensor in weights.items()}
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    one_file(folder, weights)
    notes = "\n".join(imported(folder, tmp_path / "in"))
    assert "weights are in BF16 but for model.layers.0.input_layernorm.weight (F32)" in notes
    assert "precision.mode is bf16" in notes
    assert "NaN or infinite weights, kept as they are: model.layers.1.mlp.up_proj.weight" in notes
    assert "mode: bf16" in (tmp_path / "in" / "config.yaml").read_text()


def test_a_tokenizer_larger_than_the_model_is_refused_at_import(folder, tmp_path) -> None:
    size = add_tokens(folder / "tokenizer.json", *(f"<extra{number}>" for number in range(NUM_TOKENS)))
    with pytest.raises(BadInputError, match="resize_token_embeddings") as caught:
        imported(folder, tmp_path / "out", tokenizer=True)
    assert f"has {size} tokens, but the model has embeddings for {NUM_TOKENS}" in str(caught.value)


def add_tokens(tokenizer: Path, *names: str) -> int:
    """Add special tokens; the number of tokens after that."""
    loaded = tokenizers.Tokenizer.from_file(str(tokenizer))
    loaded.add_special_tokens(list(names))
    loaded.save(str(tokenizer))
    return loaded.get_vocab_size()


def eod_id(folder: Path) -> int:
    """The id that ends documents."""
    found = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|endoftext|>")
    assert found is not None
    return found


def special(tokenizer: Path, **files: dict[str, Any]) -> None:
    for name, content in files.items():
        tokenizer.with_name(f"{name}.json").write_text(json.dumps(content))


def check_ids(folder: Path, expected: int, described: bool = True) -> None:
    """What transformers takes for the end is what ended documents, and all that it knows has an embedding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    generation = GenerationConfig.from_pretrained(folder)
    assert tokenizer.eos_token_id == generation.eos_token_id == expected
    assert config["eos_token_id"] == expected or not described
    for token_id in (tokenizer.pad_token_id, tokenizer.bos_token_id, generation.pad_token_id, config["bos_token_id"]):
        assert token_id is None or token_id < NUM_TOKENS
    assert len(tokenizer) <= NUM_TOKENS
    assert tokenizer.pad_token_id is not None


def test_generation_stops_where_documents_end(folder, tmp_path) -> None:
    """Qwen's files name an end of turn, which the run never saw, and special tokens that have no embedding."""
    path = folder / "tokenizer.json"
    turn_id = add_tokens(path, TURN) - 1
    decoder = {str(NUM_TOKENS + 7): {"content": "<pad>", "special": True}}
    config = {"eos_token": TURN, "added_tokens_decoder": decoder, "extra_special_tokens": ["<vision>"]}
    special(path, tokenizer_config=config, special_tokens_map={"pad_token": "<pad>", "bos_token": {"content": "<s>"}})
    imported(folder, tmp_path / "in", tokenizer=True)
    notes = "\n".join(exported(tmp_path / "in", tmp_path / "out"))
    check_ids(tmp_path / "out", eod_id(folder))
    assert f"eos_token is '<|endoftext|>', which ends documents in the run; it was '{TURN}'" in notes
    assert "pad_token '<pad>' has no embedding" in notes
    # With another end of documents in the run's config, that one.
    ids, _ = describe_tokenizer(tmp_path / "out", 16, TURN, NUM_TOKENS)
    assert ids["eos_token_id"] == turn_id
    check_ids(tmp_path / "out", turn_id, described=False)
    with pytest.raises(BadInputError, match=f"documents end with id {turn_id}, but the model has 50 tokens"):
        describe_tokenizer(tmp_path / "out", 16, TURN, 50)


def test_the_runs_end_of_document_token_counts(folder, tmp_path) -> None:
    imported(folder, tmp_path / "in", tokenizer=True)
    out = tmp_path / "out"
    exported(tmp_path / "in", out)
    check_ids(out, eod_id(folder))
    assert load_file(out / "model.safetensors")["model.embed_tokens.weight"].shape[0] == NUM_TOKENS
