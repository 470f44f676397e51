"""The configs for clusters: each passes its check, fits into 80 GB with room to spare, and describes itself truly."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from little_data import write_data

from megatron_fp8.config.environment import CONNECTIONS, unmet_needs, variables
from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.load import load_config
from megatron_fp8.planner.gpus import GPUS
from megatron_fp8.planner.memory import stage_memories
from megatron_fp8.planner.pipeline import bubble_share
from tests.e2e.launch import PRETRAIN, ROOT, pretrain, run

H100 = GPUS["h100-80g"]
MAX_SHARE_OF_MEMORY = 0.8
GIB = 2**30
HOPPER = (9, 0)


@dataclass(frozen=True)
class Ready:
    """A config, the parameters that its model is known for, in billions, and the world sizes that its head names."""

    name: str
    billions: float
    world_sizes: tuple[int, ...]

    @property
    def path(self) -> Path:
        return ROOT / "configs" / f"{self.name}.yaml"

    @property
    def head(self) -> str:
        return self.path.read_text(encoding="utf-8").partition("run:")[0]


READY = [
    Ready("llama_8b_fp8", 8.03, (8, 16, 32)),
    Ready("llama_70b_fp8", 70.6, (64, 128)),
    Ready("gpt_175b_fp8", 175, (128, 512)),
]
each = pytest.mark.parametrize("ready", READY, ids=lambda ready: ready.name)


@each
def test_it_passes_its_check_once_there_is_data(ready: Ready, tmp_path: Path) -> None:
    loaded = load_config(ready.path).config
    write_data(tmp_path / Path(loaded.data.train_data_path[0]).parent, loaded.model.seq_length + 1)
    ended = pretrain(ready.path, "--check", "--world-size", str(ready.world_sizes[0]), cwd=tmp_path)
    assert (ended.code, ended.stderr) == (0, ""), ended.output
    assert f"can run on {ready.world_sizes[0]} ranks" in ended.stdout


def test_a_fresh_clone_is_told_every_file_that_is_missing(tmp_path: Path) -> None:
    ended = pretrain(READY[0].path, "--check", "--world-size", "8", cwd=tmp_path)
    assert ended.code == 2
    assert "3 mistakes" in ended.stderr
    for key in ("data.train_data_path", "data.valid_data_path", "data.tokenizer_model"):
        assert re.search(rf"^{key} = .*\({re.escape(str(READY[0].path))}:\d+\)$", ended.stderr, re.MULTILINE)


@each
def test_its_plan_needs_no_data_and_fits_into_80_gb(ready: Ready, tmp_path: Path) -> None:
    ended = pretrain(ready.path, "--plan", "--world-size", str(ready.world_sizes[0]), cwd=tmp_path)
    assert ended.code == 0, ended.output
    assert f"% of {H100.memory_bytes / 1e9:.0f} GB: fits" in ended.stdout


@each
def test_there_is_room_to_spare_and_its_head_says_how_much(ready: Ready) -> None:
    config = load_config(ready.path).config
    for world_size in ready.world_sizes:
        layout = derive_layout(config, world_size, None)
        most = max(memory.total for memory in stage_memories(config, layout, H100))
        assert most <= MAX_SHARE_OF_MEMORY * H100.memory_bytes
        assert layout.num_parameters / 1e9 == pytest.approx(ready.billions, rel=0.005)
        if f"world size {world_size})" in ready.head:
            said = ready.head.partition(f"world size {world_size})")[2]
            assert f"{most / GIB:.1f} GiB" in said
            bubble = bubble_share(layout)
            assert (f"bubble {bubble:.1%}".replace("%", " %") if bubble else "no bubble") in said
    assert f"world size {ready.world_sizes[0]})" in ready.head
    assert "It has not been run on that hardware." in " ".join(ready.head.replace("#", "").split())


@each
def test_it_carries_the_environment_that_its_layout_needs(ready: Ready) -> None:
    parallel = load_config(ready.path).config.parallel
    assert unmet_needs(parallel, variables(parallel.environment), HOPPER) == []
    assert [problem.key for problem in unmet_needs(parallel, {}, HOPPER)] == ["parallel.environment"]
    assert variables(parallel.environment)[CONNECTIONS] == "1"


@each
def test_it_asks_for_what_such_a_run_is_expected_to_use(ready: Ready) -> None:
    config = load_config(ready.path).config
    assert (config.precision.mode, config.precision.fp8_recipe) == ("fp8", "delayed")
    parallel = config.parallel
    assert parallel.sequence_parallel
    assert parallel.use_distributed_optimizer
    assert parallel.overlap_grad_reduce
    assert parallel.overlap_param_gather


@pytest.mark.slow
@each
def test_a_small_model_trains_under_all_its_other_keys(ready: Ready, tmp_path: Path) -> None:
    """On four ranks: a stage count and chunks where the config has them, its formats, overlaps and environment."""
    config = load_config(ready.path).config
    write_data(tmp_path / Path(config.data.train_data_path[0]).parent, 400)
    stages = 2 if config.parallel.pipeline_model_parallel_size > 1 else 1
    chunks = config.parallel.virtual_pipeline_model_parallel_size
    groups = "null" if config.model.num_query_groups is None else "2"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", PRETRAIN]
    overrides = [
        *(f"model.{name}" for name in ("hidden_size=64", "num_attention_heads=4", "ffn_hidden_size=128")),
        *(f"model.{name}" for name in ("seq_length=32", f"num_layers={stages * (chunks or 2)}")),
        *(f"model.{name}" for name in (f"num_query_groups={groups}", "vocab_size=null")),
        "parallel.tensor_model_parallel_size=2",
        f"parallel.pipeline_model_parallel_size={stages}",
        *(f"training.{name}" for name in ("global_batch_size=8", "train_iters=3", "eval_iters=1")),
        "optimizer.lr_warmup_iters=1",
        "logging.log_interval=1",
    ]
    ended = run([*launcher, ready.path, *overrides], tmp_path, timeout_seconds=540)
    assert ended.code == 0, ended.output
    assert "finished 3 iterations" in ended.stdout
