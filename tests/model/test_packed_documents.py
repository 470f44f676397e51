"""Documents that share a sample are trained on as if each had been alone, in every layout and number format."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_fp8.prepare.train_tokenizer import train_bpe
from tests.ranks import run_on_ranks
from tests.small_run import SEQ_LENGTH, small_config

VOCAB_SIZE = 300
EOD = 0
GPT2 = {
    "position_embedding_type": "learned_absolute",
    "num_query_groups": None,
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
}
# An end at the start, in the middle, twice in a row, last, and none.
ENDS = ([0, 9], [15, 16, SEQ_LENGTH - 1], [], [3, 20])


def config_of(**sections: dict[str, Any]) -> Any:
    """The small model with room for the tokenizer's 257 tokens."""
    model = {"vocab_size": VOCAB_SIZE, **sections.get("model", {})}
    return small_config(**{"training": {"global_batch_size": 8}, **sections, "model": model})


def text(num_samples: int = len(ENDS)) -> Any:
    """Samples and the token after each of theirs, int64 `[num_samples, s + 1]`, with ends of documents at `ENDS`."""
    import torch

    tokens = torch.randint(1, VOCAB_SIZE, (num_samples, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(7))
    for row, ends in zip(tokens, ENDS * (num_samples // len(ENDS)), strict=True):
        row[ends] = EOD
    return tokens


def build(config: Any) -> Any:
    """This rank's parts."""
    import torch
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    from megatron_fp8 import device as devices
    from megatron_fp8.config.layout import derive_layout
    from megatron_fp8.report.record import Recorder
    from megatron_fp8.train.setup import build_parts

    FP8GlobalStateManager.reset()
    initialize_rng_tracker(force_reset=True)
    layout = derive_layout(config, torch.distributed.get_world_size(), VOCAB_SIZE)
    return build_parts(config, layout, VOCAB_SIZE, devices.prepare(), Recorder([]))


def losses_and_gradients(chunk: Any, calls: list[tuple[Any, ...]]) -> tuple[Any, dict[str, Any]]:
    """Per-token losses of forward passes one after another, `[t]`, and the gradients of their sum."""
    import torch

    chunk.zero_grad_buffer()
    chunk.module.is_first_microbatch = True
    losses = []
    for tokens, positions, labels, cu_seqlens in calls:
        loss = chunk(tokens, positions, labels=labels, cu_seqlens=cu_seqlens).flatten()
        loss.sum().backward()
        losses.append(loss.detach())
    return torch.cat(losses), {name: each.main_grad.clone() for name, each in chunk.module.named_parameters()}


def packed_and_apart(model: dict[str, Any]) -> None:
    import torch
    from torch.testing import assert_close

    from megatron_fp8.data.documents import cumulative_lengths, document_positions

    chunk = build(config_of(model=model)).chunks[0]
    tokens, labels = text().cuda()[:, :-1], text().cuda()[:, 1:]
    packed = (tokens, document_positions(tokens, EOD), labels, cumulative_lengths(tokens, EOD))
    lengths = [length for length in packed[3].diff().tolist() if length > 0]
    assert lengths == [1, 9, 22, 16, 1, 15, 32, 4, 17, 11]
    apart = [
        (document[None], torch.arange(len(document), device="cuda")[None], following[None], None)
        for document, following in zip(tokens.flatten().split(lengths), labels.flatten().split(lengths), strict=True)
    ]
    found_losses, found = losses_and_gradients(chunk, [packed])
    expected_losses, expected = losses_and_gradients(chunk, apart)
    assert_close(found_losses, expected_losses, rtol=0, atol=3e-6)
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (found[name] - gradient).norm() < 3e-6 * gradient.norm(), name
    unaware, _ = losses_and_gradients(chunk, [(*packed[:3], None)])
    assert (unaware - expected_losses).abs().max() > 1e-2


@pytest.mark.parametrize("model", [{}, GPT2, {"recompute_granularity": "full"}], ids=["llama", "gpt2", "recomputed"])
def test_a_packed_sample_equals_its_documents_run_apart(model: dict[str, Any]) -> None:
    run_on_ranks(1, packed_and_apart, model)


def contaminated(precision: dict[str, Any]) -> None:
    import torch

    from megatron_fp8.data.documents import cumulative_lengths

    stage = build(config_of(precision=precision)).chunks[0].module.eval()
    tokens, labels = text().cuda()[:, :-1], text().cuda()[:, 1:]
    changed = tokens.clone()
    changed[0, 4] += 1
    changed[1, 20] += 1
    same = torch.ones_like(tokens, dtype=torch.bool)
    same[0, 4:10] = same[1, 20:32] = False
    positions = torch.arange(SEQ_LENGTH, device="cuda").expand(len(tokens), -1)

    def differs(cu_seqlens: Any) -> Any:
        with torch.no_grad():
            before, after = (stage(each, positions, labels, cu_seqlens) for each in (tokens, changed))
        return before != after

    assert torch.equal(differs(cumulative_lengths(tokens, EOD)), ~same)
    # Without it the next documents of the sample hear of the change.
    assert differs(None)[0, 10:].all()


@pytest.mark.parametrize("mode", ["fp32", "bf16", "delayed", "blockwise", "mxfp8"])
def test_no_document_hears_of_another(mode: str) -> None:
    """Bit for bit. Not with tensorwise scaling, where every token of the micro-batch has a part in the scale."""
    is_recipe = mode not in ("fp32", "bf16")
    run_on_ranks(1, contaminated, {"mode": "fp8", "fp8_recipe": mode} if is_recipe else {"mode": mode})


class Samples:
    """What a dataset gives of `text`."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        row = text(16)[index % 16]
        return {
            "tokens": row[:-1],
            "labels": row[1:],
            "loss_mask": (row[:-1] != EOD).float(),
            "position_ids": torch.arange(SEQ_LENGTH),
        }


def steps(configs: list[Any]) -> list[list[float]]:
    """Losses of three steps and of an evaluation after them through the loader, and gradient norms, of each config."""
    from megatron.core import parallel_state

    runs = []
    for config in configs:
        parts = build(config)
        run = []
        with parts.batches.loader(Samples(), 5 * config.training.global_batch_size) as loader:
            iterators = loader.iterators(len(parts.chunks))
            for _ in range(3):
                result = parts.stepper.train(parts.optimizer, iterators, parts.batches.shape)
                run += [result.loss.reduced_mean(), result.grad_norm]
            run.append(parts.stepper.evaluate(iterators, parts.batches.shape).reduced_mean())
        parallel_state.destroy_model_parallel()
        runs.append(run)
    return runs


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The section that keeps documents apart."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    assert train_bpe(["no text"], 257, path).eod_id == EOD
    return {"tokenizer_model": str(path), "reset_attention_mask": True, "reset_position_ids": True}


LAYOUTS = {
    "tp2-sp-pp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2},
    "pp4": {"pipeline_model_parallel_size": 4},
    "pp2-vpp2-dp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize("model", [{}, GPT2], ids=["llama", "gpt2"])
def test_every_layout_keeps_documents_apart_alike(model: dict[str, Any], documents: dict[str, Any]) -> None:
    model = {**model, "recompute_granularity": "full"}
    configs = [config_of(model=model, data=documents, parallel=parallel) for parallel in LAYOUTS.values()]
    plain = config_of(model={**model, "recompute_granularity": "none"}, data=documents)
    ((expected, without),) = run_on_ranks(1, steps, [plain, config_of(model=model)])
    assert expected[0] != pytest.approx(without[0], rel=1e-4)
    for rank in run_on_ranks(4, steps, configs):
        for layout, run in zip(LAYOUTS, rank, strict=True):
            assert run == pytest.approx(expected, rel=2e-5), layout


def test_dropout_of_documents_is_recomputed_alike(documents: dict[str, Any]) -> None:
    dropout = {"attention_dropout": 0.2, "hidden_dropout": 0.1, "num_layers": 2}
    recomputed = {**dropout, "recompute_granularity": "full"}
    models = [dropout, recomputed, {**dropout, "attention_dropout": 0.0}]
    ((plain, again, weaker),) = run_on_ranks(1, steps, [config_of(model=each, data=documents) for each in models])
    assert again == plain
    assert weaker[0] != plain[0]


def test_fp8_trains_on_documents_kept_apart(documents: dict[str, Any]) -> None:
    """Near FP32's losses, over sequence-parallel ranks and recomputed."""
    sections = {
        "model": {"recompute_granularity": "full", "num_layers": 2},
        "data": documents,
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    }
    recipes = ["delayed", "tensorwise", "blockwise", "mxfp8"]
    fp8 = [config_of(**sections, precision={"mode": "fp8", "fp8_recipe": recipe}) for recipe in recipes]
    (expected, *runs), other_rank = run_on_ranks(2, steps, [config_of(**sections), *fp8])
    assert other_rank == [expected, *runs]
    for recipe, run in zip(recipes, runs, strict=True):
        assert losses_of(run) == pytest.approx(losses_of(expected), abs=0.02), recipe
        assert run[0] != expected[0], recipe


def losses_of(run: list[float]) -> list[float]:
    return [*run[:-1:2], run[-1]]
