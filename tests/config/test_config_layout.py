"""Derived sizes against independent arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_samples import VOCAB_SIZE, load_small

from megatron_fp8.config.layout import GemmShape, LayoutError, derive_layout, pad_vocab_size


@pytest.mark.parametrize(("tp", "padded"), [(1, 50304), (2, 50432), (8, 51200)])
def test_the_vocabulary_is_padded_as_megatron_pads_it(tmp_path: Path, tp: int, padded: int) -> None:
    assert pad_vocab_size(50257, 128, tp) == padded
    overrides = [f"parallel.tensor_model_parallel_size={tp}", "model.num_query_groups=8"]
    layout = derive_layout(load_small(tmp_path, overrides).config, tp, 50257)
    assert (layout.padded_vocab_size, layout.padded_vocab_size_per_rank) == (padded, padded // tp)


def test_sizes_of_a_rank(tmp_path: Path) -> None:
    overrides = [
        *("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"),
        *("parallel.virtual_pipeline_model_parallel_size=2", "parallel.sequence_parallel=true"),
    ]
    layout = derive_layout(load_small(tmp_path, overrides).config, 8, VOCAB_SIZE)
    assert (layout.data_parallel_size, layout.num_microbatches, layout.num_chunks) == (2, 4, 2)
    assert (layout.kv_channels, layout.num_query_groups, layout.ffn_hidden_size) == (16, 4, 256)
    assert (layout.attention_heads_per_rank, layout.query_groups_per_rank) == (4, 2)
    assert (layout.layers_per_stage, layout.layers_per_chunk) == (2, 1)
    assert (layout.seq_length_per_rank, layout.max_position_embeddings) == (32, 64)
    assert (layout.tokens_per_microbatch, layout.tokens_per_global_batch) == (128, 1024)
    assert (layout.qkv_rows, layout.fc1_rows, layout.rotary_dim) == ((8 + 4 + 4) * 16, 512, 16)
    assert layout.gemms == (
        GemmShape("qkv", 128, 128, 128),
        GemmShape("proj", 128, 64, 128),
        GemmShape("fc1", 128, 128, 256),
        GemmShape("fc2", 128, 128, 128),
    )


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("untied", [True, False])
@pytest.mark.parametrize("kind", [("RMSNorm", "swiglu", "rope"), ("LayerNorm", "gelu", "learned_absolute")])
def test_parameters_are_the_sum_over_all_tensors(
    tmp_path: Path, biases: bool, untied: bool, kind: tuple[str, str, str]
) -> None:
    normalization, activation, positions = kind
    overrides = [
        *(f"model.add_bias_linear={biases}", f"model.untie_embeddings_and_output_weights={untied}"),
        *(f"model.normalization={normalization}", f"model.activation={activation}"),
        f"model.position_embedding_type={positions}",
    ]
    layout = derive_layout(load_small(tmp_path, overrides).config, 1, VOCAB_SIZE)
    h, ffn, kv, vocab = 128, 256, 4 * 16, 1024
    fc1 = 2 * ffn if activation == "swiglu" else ffn
    norm = [(h,)] * (2 if normalization == "LayerNorm" else 1)
    linears = [(h, h), (kv, h), (kv, h), (h, h), (fc1, h), (h, ffn)]
    block = [*norm, *norm, *linears, *([(rows,) for rows, _ in linears] if biases else [])]
    shapes = [*(block * 4), *norm, *([(vocab, h)] * (2 if untied else 1))]
    shapes += [(64, h)] if positions == "learned_absolute" else []
    expected = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes)
    assert layout.num_parameters == expected


def test_the_configs_vocabulary_comes_before_the_tokenizers(tmp_path: Path) -> None:
    config = load_small(tmp_path, ["model.vocab_size=2000"]).config
    assert derive_layout(config, 1, VOCAB_SIZE).vocab_size == 2000
    with pytest.raises(LayoutError, match="vocabulary"):
        derive_layout(load_small(tmp_path).config, 1, None)


@pytest.mark.parametrize(
    ("override", "world_size", "name"),
    [
        ("parallel.tensor_model_parallel_size=3", 4, "world size"),
        ("parallel.tensor_model_parallel_size=3", 3, "num_attention_heads"),
        ("parallel.pipeline_model_parallel_size=3", 3, "num_layers"),
        ("model.kv_channels=16", 3, "global_batch_size"),
        ("model.hidden_size=100", 1, "hidden_size"),
    ],
)
def test_sizes_that_do_not_divide_are_named(tmp_path: Path, override: str, world_size: int, name: str) -> None:
    with pytest.raises(LayoutError, match=name):
        derive_layout(load_small(tmp_path, [override]).config, world_size, VOCAB_SIZE)
