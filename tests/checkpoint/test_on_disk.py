"""What a checkpoint is on the disk, whatever version of Megatron Core wrote it: names, keys, and who can read it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_fp8.checkpoint.plain_index import read_plain_index
from megatron_fp8.checkpoint.tensor_files import TensorReader
from tests.checkpoint.training import STEPS, checkpoint_config, train_on_this_rank
from tests.ranks import run_on_ranks

PARAMETERS = {
    "embedding.word_embeddings.weight",
    "layers.0.layernorm_mlp.fc1_weight",
    "layers.0.layernorm_mlp.fc2_weight",
    "layers.0.layernorm_mlp.layer_norm_weight",
    "layers.0.self_attention.layernorm_qkv.layer_norm_weight",
    "layers.0.self_attention.layernorm_qkv.weight",
    "layers.0.self_attention.proj.weight",
    "final_norm.weight",
    "output_layer.weight",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two tensor-parallel ranks."""
    config = checkpoint_config(
        model={"num_layers": 1},
        training={"eval_iters": 0},
        parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True},
        precision={"mode": "fp8", "fp8_amax_history_len": 4},
        checkpoint={"save_interval": STEPS},
    )
    directory = tmp_path_factory.mktemp("checkpoints")
    run_on_ranks(2, train_on_this_rank, config, directory)
    return directory / f"iter_{STEPS:07d}"


def test_files_are_two_of_each_rank_the_index_and_the_manifest(written: Path) -> None:
    tensors = {f"__{rank}_{number}.distcp" for rank in range(2) for number in range(2)}
    assert {path.name for path in written.iterdir()} == {*tensors, ".metadata", "manifest.json"}


def test_keys_are_names_of_the_whole_model(written: Path) -> None:
    index = read_plain_index(written)
    states = {f"{state}.{name}" for state in ("master", "exp_avg", "exp_avg_sq") for name in PARAMETERS}
    own = {f"{name}@tp{rank}of2.pp0of1.dp0of1" for name in ("rng.host", "interval_loss") for rank in range(2)}
    assert states | own <= index.keys()
    assert {name.split(".")[0].split("@")[0] for name in index.keys() - states} == {"rng", "interval_loss", "precision"}
    assert all(index[name].dtype == "float32" for name in states)


class _NamesSeen(pickle.Unpickler):
    """Unpickles, and remembers where what it was told to call comes from."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.packages: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.packages.add(module.split(".")[0])
        return super().find_class(module, name)


def test_the_index_names_nothing_but_torch_s_own(written: Path) -> None:
    with (written / ".metadata").open("rb") as file:
        reader = _NamesSeen(file)
        reader.load()
    assert reader.packages == {"torch"}


def test_torch_s_own_loader_reads_every_tensor(written: Path) -> None:
    ours = TensorReader(written)
    theirs = {
        name: torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        for name, stored in read_plain_index(written).items()
    }
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(written), no_dist=True)
    assert [name for name, tensor in theirs.items() if not torch.equal(tensor, ours.read(name))] == []


def load_with_megatron(directory: Path) -> dict[str, torch.Tensor]:
    """The masters by Megatron's loader of this format, in the running world."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    wanted = {
        name: ShardedTensor.from_rank_offsets(name, torch.empty(stored.shape, dtype=getattr(torch, stored.dtype)))
        for name, stored in read_plain_index(directory).items()
        if name.startswith("master.")
    }
    return TorchDistLoadShardedStrategy().load(wanted, directory)


def test_megatron_s_loader_of_torch_s_format_reads_it(written: Path) -> None:
    (found,) = run_on_ranks(1, load_with_megatron, written)
    ours = TensorReader(written)
    assert found.keys() == {f"master.{name}" for name in PARAMETERS}
    assert [name for name, tensor in found.items() if not torch.equal(tensor, ours.read(name))] == []
