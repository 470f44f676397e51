"""What `training.deterministic_mode` switches in torch, Megatron and Transformer Engine; training runs with it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_on_ranks
from tests.small_run import run_small, small_config


def switches(parts: Any) -> dict[str, Any]:
    import torch
    from megatron.core.tensor_parallel import VocabParallelEmbedding
    from transformer_engine.pytorch import DotProductAttention

    seen: dict[str, set[bool]] = {"word embedding": set(), "attention": set()}
    for chunk in parts.chunks:
        for module in chunk.modules():
            if isinstance(module, VocabParallelEmbedding):
                seen["word embedding"].add(module.deterministic_mode)
            if isinstance(module, DotProductAttention):
                seen["attention"].add(module.deterministic)
    gradients = [node for node in _nodes(parts) if "embedding" in node.lower() or node.startswith("IndexBackward")]
    on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    return {"torch": on, "embedding gradients": sorted(set(gradients)), **seen}


def _nodes(parts: Any) -> set[str]:
    """Names of the backward pass' nodes from the embedding's output on."""
    import torch

    embedding = parts.chunks[0].module.embedding
    device = parts.device.torch_device
    tokens = torch.zeros(2, 8, dtype=torch.long, device=device)
    found, waiting = set(), [embedding(tokens, torch.arange(8, device=device).expand(2, -1)).grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            found.add(node.name())
            waiting += [each for each, _ in node.next_functions]
    return found


@pytest.mark.parametrize("on", [True, False])
def test_every_switch_follows_the_key(on: bool) -> None:
    config = small_config(
        model={"num_layers": 1, "position_embedding_type": "learned_absolute"},
        precision={"mode": "bf16"},
        training={"deterministic_mode": on, "global_batch_size": 2},
    )
    (record,) = run_on_ranks(1, run_small, config, 1, switches)
    assert record.probe == {
        "torch": on,
        "word embedding": {on},
        "attention": {on},
        "embedding gradients": ["IndexBackward0"] if on else ["EmbeddingBackward0"],
    }


@pytest.mark.parametrize("mode", ["bf16", "fp8"])
def test_runs_with_it_are_the_same_runs_bit_for_bit(mode: str) -> None:
    config = small_config(
        model={"num_layers": 2, "hidden_dropout": 0.1},
        precision={"mode": mode},
        parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True},
        training={"deterministic_mode": True, "global_batch_size": 4},
    )
    first, second = (run_on_ranks(2, run_small, config, 3) for _ in range(2))
    assert [rank.steps for rank in first] == [rank.steps for rank in second]
    training = config.training.model_copy(update={"deterministic_mode": False})
    plain = config.model_copy(update={"training": training})
    losses = [step.loss for step in run_on_ranks(2, run_small, plain, 3)[0].steps]
    assert [step.loss for step in first[0].steps] == pytest.approx(losses, rel=1e-4)
