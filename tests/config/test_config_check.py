"""What must hold between keys: each rule refuses what it is for, and accepts the small config."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_samples import VOCAB_SIZE, load_small

from megatron_fp8.config.check import check_config, fitting_world_sizes

TP, PP, VPP = (
    "parallel.tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size",
    "parallel.virtual_pipeline_model_parallel_size",
)


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ([], 1),
        ([], None),
        (["precision.mode=fp8"], 8),
        ([f"{TP}=2", f"{PP}=2", "parallel.sequence_parallel=true", "precision.mode=fp8"], 4),
        ([f"{PP}=2", f"{VPP}=2"], 4),
        (["optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=100"], 1),
        (["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"], 2),
        (["training.eval_iters=0", "data.valid_data_path=[]"], 2),
        (["model.kv_channels=20", "model.hidden_size=100"], 1),
        (["precision.mode=fp8", "precision.amax_reduction=data_parallel"], 2),
        (["precision.mode=fp8", "precision.amax_reduction=off", f"{TP}=2"], 2),
        # Without FP8 its keys and shape rules mean nothing.
        (["precision.amax_reduction=data_parallel", f"{TP}=2", "model.ffn_hidden_size=250"], 2),
        (["model.recompute_num_layers=9"], 1),
        (["data.reset_position_ids=true", "data.reset_attention_mask=true"], 1),
        (["data.reset_position_ids=true", "model.position_embedding_type=learned_absolute"], 1),
    ],
)
def test_valid_configs_pass(tmp_path: Path, overrides: list[str], world_size: int | None) -> None:
    assert check_config(load_small(tmp_path, overrides), world_size, VOCAB_SIZE) == []


@pytest.mark.parametrize(
    ("overrides", "world_size", "key", "reason", "use"),
    [
        (["model.hidden_size=130"], 1, "model.hidden_size", "num_attention_heads=8", "model.hidden_size=128 or "),
        (["model.num_query_groups=3"], 1, "model.num_query_groups", "num_attention_heads=8", "groups=2 or "),
        ([f"{TP}=3"], 3, "model.num_attention_heads", f"{TP}=3", "heads=12 (and then another model.hidden_size)"),
        ([f"{TP}=3"], None, "model.num_attention_heads", f"{TP}=3", f"{TP}=2 or {TP}=4"),
        ([f"{TP}=8"], 8, "model.num_query_groups", f"{TP}=8", "model.num_query_groups=8"),
        (["model.ffn_hidden_size=255", f"{TP}=2"], 2, "model.ffn_hidden_size", f"{TP}=2", "size=254 or "),
        ([f"{PP}=3"], 3, "model.num_layers", f"{PP}=3", "model.num_layers=3 or model.num_layers=6"),
        ([f"{PP}=2", f"{VPP}=3"], 2, "model.num_layers", f"{VPP}=3", "model.num_layers=6"),
        (
            ["model.seq_length=63", f"{TP}=2", "parallel.sequence_parallel=true"],
            *(2, "model.seq_length", "not divisible", "model.seq_length=62 or model.seq_length=64"),
        ),
        (["model.kv_channels=15"], 1, "model.kv_channels", "pairs", "model.kv_channels=14 or model.kv_channels=16"),
        (["model.rotary_percent=0.9", "model.kv_channels=10"], 1, "model.kv_channels", "gives 9", "rotary_percent=1.0"),
        (
            ["model.position_embedding_type=learned_absolute", "model.max_position_embeddings=32"],
            *(1, "model.max_position_embeddings", "shorter", "model.max_position_embeddings=64"),
        ),
        (
            ["model.recompute_granularity=full", "model.recompute_num_layers=3", f"{PP}=2"],
            *(2, "model.recompute_num_layers", "only 2 layers", "model.recompute_num_layers=2"),
        ),
        (["model.vocab_size=999"], 1, "model.vocab_size", "1000 tokens", "model.vocab_size=1000"),
        ([f"{TP}=2", f"{PP}=2"], 6, "world_size", "not divisible", "4 ranks or 8 ranks"),
        (["parallel.sequence_parallel=true"], 1, "parallel.sequence_parallel", f"{TP}=1", "sequence_parallel=false"),
        ([f"{VPP}=2"], 1, VPP, f"{PP}=1", f"{VPP}=null"),
        (
            [
                *("parallel.overlap_param_gather=true", "parallel.overlap_grad_reduce=true"),
                "parallel.use_distributed_optimizer=false",
            ],
            *(2, "parallel.overlap_param_gather", "use_distributed_optimizer", "use_distributed_optimizer=true"),
        ),
        (
            ["parallel.overlap_param_gather=true"],
            *(2, "parallel.overlap_param_gather", "overlap_grad_reduce", "overlap_grad_reduce=true"),
        ),
        (["training.global_batch_size=15"], 2, "training.global_batch_size", "size 2", "=12 or training.global_"),
        (["training.global_batch_size=15"], None, "training.global_batch_size", "micro_batch_size=2", "=14 or "),
        (
            [f"{PP}=2", f"{VPP}=2", "training.global_batch_size=6"],
            *(2, "training.global_batch_size", "gives 3 micro-batches", "size=4 or training.global_batch_size=8"),
        ),
        (
            ["precision.mode=fp8", "precision.amax_reduction=data_parallel", f"{TP}=2"],
            *(2, "precision.amax_reduction", "different scales", "precision.amax_reduction=auto"),
        ),
        (
            ["precision.mode=fp8", "precision.amax_reduction=off", f"{TP}=2", "parallel.sequence_parallel=true"],
            *(2, "precision.amax_reduction", "different scales", "precision.amax_reduction=auto"),
        ),
        (
            ["optimizer.min_lr=2e-3"],
            1,
            "optimizer.min_lr",
            "exceed",
            "optimizer.min_lr=0.0001",
        ),
        (["optimizer.lr_warmup_init=2e-3"], 1, "optimizer.lr_warmup_init", "exceed", "optimizer.lr=0.002"),
        (["optimizer.lr_warmup_iters=100"], 1, "optimizer.lr_warmup_iters", "step 100", "lr_warmup_iters=10"),
        (
            ["optimizer.lr_warmup_iters=60", "optimizer.lr_decay_iters=50"],
            *(1, "optimizer.lr_warmup_iters", "step 50", "optimizer.lr_decay_iters=61"),
        ),
        (["optimizer.lr_decay_style=WSD"], 1, "optimizer.lr_wsd_decay_iters", "required", "lr_wsd_decay_iters=20"),
        (
            ["optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_iters=91", "optimizer.lr_warmup_iters=10"],
            *(1, "optimizer.lr_wsd_decay_iters", "exceed the schedule's 100 steps", "optimizer.lr_wsd_decay_iters=90"),
        ),
        (["data.train_data_path=[]"], 1, "data.train_data_path", "no training data", "prefix"),
        (["data.valid_data_path=[]"], 1, "data.valid_data_path", "eval_iters=10", "training.eval_iters=0"),
        (
            ["data.reset_position_ids=true"],
            *(1, "data.reset_position_ids", "restart only with data.reset_attention_mask", "attention_mask=true"),
        ),
        (["data.tokenizer_model=null"], 1, "data.tokenizer_model", "vocabulary", "tokenizer.json"),
    ],
)
def test_each_rule_refuses_what_it_is_for(
    tmp_path: Path, overrides: list[str], world_size: int | None, key: str, reason: str, use: str
) -> None:
    problems = check_config(load_small(tmp_path, overrides), world_size, VOCAB_SIZE)
    assert key in {problem.key for problem in problems}
    problem = next(problem for problem in problems if problem.key == key and reason in problem.reason)
    assert use in problem.use_instead


def test_the_origin_is_that_of_the_value(tmp_path: Path) -> None:
    loaded = load_small(tmp_path, [f"{TP}=3", f"{PP}=3"])
    problems = {problem.key: problem for problem in check_config(loaded, 10, VOCAB_SIZE)}
    assert problems["model.num_layers"].origin == f"{tmp_path / 'config.yaml'}:4"
    assert problems["world_size"].origin == "the number of processes"


def test_many_mistakes_are_reported_together(tmp_path: Path) -> None:
    overrides = [f"{TP}=3", f"{PP}=3", "optimizer.min_lr=1", "data.tokenizer_model=null", "precision.mode=fp8"]
    overrides += ["model.ffn_hidden_size=1000", "training.global_batch_size=7", "model.seq_length=60"]
    keys = {problem.key for problem in check_config(load_small(tmp_path, overrides), 9, VOCAB_SIZE)}
    assert keys == {
        *("model.num_attention_heads", "model.num_query_groups", "model.ffn_hidden_size", "model.num_layers"),
        *("optimizer.min_lr", "data.tokenizer_model", "training.global_batch_size", "model.seq_length"),
    }


def test_world_sizes_that_fit(tmp_path: Path) -> None:
    assert fitting_world_sizes(load_small(tmp_path).config) == [1, 2, 4, 8]
    interleaved = load_small(tmp_path, [f"{PP}=2", f"{VPP}=2"]).config
    assert fitting_world_sizes(interleaved) == [2, 4, 8]
