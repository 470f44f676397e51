"""FLOPs per token against torch's counter on another implementation, against our own run, and published counts."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.flops import flops_per_token, mean_keys
from tests.planner.published import GPT3_175B, LLAMA3_8B, config_of
from tests.ranks import run_on_ranks
from tests.small_run import VOCAB_SIZE, batches, run_small, small_config

SIZES = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 256}
SIZES |= {"seq_length": 64}


@pytest.mark.slow
def test_the_count_is_that_of_transformers_llama() -> None:
    """Eager attention there multiplies all keys."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="eager",
        )
    )
    tokens = torch.randint(0, 256, (3, 64))
    with FlopCounterMode(display=False) as forward:
        logits = model(tokens).logits
    with FlopCounterMode(display=False) as backward:
        logits.float().pow(2).sum().backward()
    config = small_config(model=SIZES | {"vocab_size": 256}, training={"micro_batch_size": 1})
    flops = flops_per_token(config, derive_layout(config, 1, None))
    # The angles of RoPE are made by a small product there.
    assert forward.get_total_flops() / tokens.numel() == pytest.approx(flops.model_with_all_keys / 3, rel=1e-3)
    assert backward.get_total_flops() / tokens.numel() == pytest.approx(2 * flops.model_with_all_keys / 3, rel=1e-3)


def count_step(parts: Any) -> dict[str, int]:
    """FLOPs of matrix products in one step, those of attention apart, by torch's counter."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
    found = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    return {"mm": sum(flops for name, flops in found.items() if name in ("aten.mm", "aten.addmm"))}


def observe(config: Config) -> dict[str, int]:
    return run_small(config, 0, count_step).probe


@pytest.mark.parametrize(("again", "share"), [(None, 0.0), (1, 0.5), (2, 1.0)])
def test_a_step_of_our_own_multiplies_as_often(again: int | None, share: float) -> None:
    model = SIZES | ({} if again is None else {"recompute_granularity": "full", "recompute_num_layers": again})
    config = small_config(model=model, precision={"mode": "fp32"})
    layout = derive_layout(config, 1, VOCAB_SIZE)
    (observed,) = run_on_ranks(1, observe, config)
    flops = flops_per_token(config, layout)
    linear = (3 + share) * flops.linear + 3 * flops.head
    assert observed["mm"] == pytest.approx(linear * layout.tokens_per_global_batch, rel=1e-6)
    assert flops.recompute == pytest.approx(share * (flops.linear + flops.attention))


def test_a_query_reads_itself_and_what_was_before_it() -> None:
    config = small_config(model=SIZES)
    flops = flops_per_token(config, derive_layout(config, 1, VOCAB_SIZE))
    pairs = sum(query + 1 for query in range(64))
    assert flops.attention == 2 * (2 * 2 * 4 * 32) * pairs / 64
    assert flops.all_keys == 2 * (2 * 2 * 4 * 32) * 64


def test_narayanan_et_al() -> None:
    """Equation 3 of "Efficient Large-Scale Language Model Training": all keys, and each layer's forward pass twice."""
    config = config_of(GPT3_175B | {"recompute_granularity": "full"}, parallel={"tensor_model_parallel_size": 8})
    layout = derive_layout(config, 8, None)
    flops = flops_per_token(config, layout)
    layers, hidden, tokens, vocabulary = 96, 12288, 2048, 51200
    published = 96 * layers * hidden**2 * (1 + tokens / (6 * hidden) + vocabulary / (16 * layers * hidden))
    again = flops.linear + flops.all_keys
    assert flops.model_with_all_keys + again == pytest.approx(published, rel=1e-9)


def test_six_times_the_parameters() -> None:
    """The rule of thumb, 6 N, leaves attention out and counts the embedding, which multiplies nothing."""
    config = config_of(LLAMA3_8B)
    layout = derive_layout(config, 1, None)
    flops = flops_per_token(config, layout)
    without = 6 * (layout.num_parameters - 128256 * 4096)
    assert flops.model - 3 * flops.attention == pytest.approx(without, rel=1e-4)


@pytest.mark.parametrize("window", [None, 0, 1, 5, 30, 31, 32, 1000])
def test_a_query_reads_the_keys_in_its_window(window: int | None) -> None:
    model = small_config(model={"window_size": window if window is None else [window, 0]}).model
    keys = [min(query, query if window is None else window) + 1 for query in range(model.seq_length)]
    assert mean_keys(model, 0) == pytest.approx(sum(keys) / len(keys))


def test_layers_without_the_window_read_all() -> None:
    model = small_config(model={"window_size": [3, 0], "window_attn_skip_freq": [2]}).model
    assert mean_keys(model, 0) < 4 < mean_keys(model, 1) == (model.seq_length + 1) / 2
