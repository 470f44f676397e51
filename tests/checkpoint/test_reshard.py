"""A checkpoint of one layout is taken over by another: every element, the scaling state, the order of samples."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp8.config.schema import Config
from tests.checkpoint.training import STEPS, STEPS_BEFORE, Trained, checkpoint_config, train_on_this_rank
from tests.ranks import RankError, run_on_ranks

GPT = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
    "fuse_qkv_params": False,
    "untie_embeddings_and_output_weights": False,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp2vpp2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "dp2-replicated": (2, {"use_distributed_optimizer": False}),
    "tp2dp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp2pp2": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2},
    ),
}
FP8 = {"mode": "fp8", "fp8_amax_history_len": 4}
FP16 = {"mode": "fp16", "initial_loss_scale": 2.0**12}


def make_config(layout: str, precision: dict[str, Any], model: dict[str, Any], **sections: Any) -> Config:
    return checkpoint_config(
        model={"num_layers": 2, **model},
        precision=precision,
        parallel=LAYOUTS[layout][1],
        **sections,
    )


@dataclass(frozen=True)
class Piece:
    """Flat elements `start` on of a rank's shard of one state of a parameter."""

    tp_rank: int
    start: int
    shard_shape: tuple[int, ...]
    values: torch.Tensor


def pieces_and_scaling(parts: Any) -> tuple[dict[str, list[Piece]], dict[str, torch.Tensor], dict[str, float]]:
    """This rank's masters and moments by state and whole-model name, its scaling state, Adam's step and loss scale."""
    from megatron_fp8.model.build import global_parameters
    from megatron_fp8.optim.state import read_scalars, state_parts

    names = {parameter: name for name, parameter in global_parameters(parts.chunks)}
    pieces: dict[str, list[Piece]] = {}
    for part in state_parts(parts.optimizer):
        shape = tuple(part.parameter.shape)
        for state in ("master", "exp_avg", "exp_avg_sq"):
            piece = Piece(parts.groups.tp.rank(), part.start, shape, part.read(state).clone())
            pieces.setdefault(f"{state} {names[part.parameter]}", []).append(piece)
    return pieces, parts.precision.state_dict(), read_scalars(parts.optimizer)


def whole(ranks: list[Trained], activation: str) -> dict[str, torch.Tensor]:
    """Every state of the whole model, put together from all ranks by what tensor parallelism means."""
    from megatron_fp8.model.sharding import parameter_sharding

    found: dict[str, list[Piece]] = {}
    for rank in ranks:
        for name, pieces in rank.probe[0].items():
            found.setdefault(name, []).extend(pieces)
    result = {}
    for name, pieces in found.items():
        shards: dict[int, torch.Tensor] = {}
        for piece in pieces:
            shard = shards.setdefault(piece.tp_rank, torch.full(piece.shard_shape, torch.nan))
            shard.view(-1)[piece.start : piece.start + len(piece.values)] = piece.values
        sharding = parameter_sharding(name.split(" ")[1], activation)
        ordered = [shards[rank] for rank in sorted(shards)]
        if sharding.axis is None:
            assert all(torch.equal(shard, ordered[0]) for shard in ordered)
            result[name] = ordered[0]
        else:
            parts = [shard.chunk(sharding.num_parts, dim=sharding.axis) for shard in ordered]
            result[name] = torch.cat([part for group in zip(*parts, strict=True) for part in group], sharding.axis)
        if sharding.is_padded_vocab:
            assert not result[name][250:].any()
            result[name] = result[name][:250]
        assert not result[name].isnan().any()
    return result


def scaling(ranks: list[Trained]) -> dict[str, torch.Tensor]:
    return {name: value for rank in ranks for name, value in rank.probe[1].items()}


def train(layout: str, config: Config, save: Path | None, load: Path | None = None, **more: Any) -> list[Trained]:
    return run_on_ranks(
        LAYOUTS[layout][0], train_on_this_rank, config, save, load, False, None, pieces_and_scaling, **more
    )


def read_samples(ranks: list[Trained]) -> set[int]:
    return {index for rank in ranks for index in rank.samples}


def require_carried_over(
    before: str, after: str, precision: dict[str, Any], model: dict[str, Any], directory: Path
) -> None:
    if "vpp" in before + after:
        # Two chunks on each of two stages.
        model = {"num_layers": 4, **model}
    first = make_config(before, precision, model)
    straight = train(before, first, directory)
    second = make_config(after, precision, model)
    resumed = train(after, second, None, directory / f"iter_{STEPS_BEFORE:07d}")
    saved, loaded = whole(straight, first.model.activation), whole(resumed, first.model.activation)
    assert saved.keys() == loaded.keys()
    assert [name for name, value in saved.items() if not torch.equal(value, loaded[name])] == []
    assert any(value.any() for name, value in saved.items() if name.startswith("exp_avg_sq"))
    assert all(rank.probe[2] == straight[0].probe[2] for rank in resumed)
    scales, loaded_scales = scaling(straight), scaling(resumed)
    assert scales.keys() == loaded_scales.keys()
    assert [name for name, value in scales.items() if not torch.equal(value, loaded_scales[name])] == []
    size = first.training.global_batch_size
    assert read_samples(resumed) == set(range(STEPS_BEFORE * size, STEPS * size))
    assert all("random streams of dropout start from scratch" in note for rank in resumed for note in rank.notes)
    assert all(len(rank.notes) == 1 for rank in resumed)
    for one, other in zip(straight[0].series(after=STEPS_BEFORE), resumed[0].series(), strict=True):
        assert one["event"] == other["event"]
        for name in ("lm loss", "lm loss validation"):
            if name in one:
                # FP8 rounds what differs by the order of sums to different numbers at times.
                assert other[name] == pytest.approx(one[name], abs=2e-2 if precision["mode"] == "fp8" else 2e-3)
        for name in ("learning-rate", "consumed-samples", "consumed-tokens", "loss-scale"):
            assert one.get(name) == other.get(name)


CASES = [
    pytest.param("one", "tp2", FP8, {}, marks=pytest.mark.slow),
    ("tp2", "pp2vpp2", FP8, GPT),
    ("pp2vpp2", "dp2", {"mode": "bf16"}, {"untie_embeddings_and_output_weights": False}),
    ("dp2-replicated", "pp2", FP16, {}),
    pytest.param("dp2", "tp2", {"mode": "fp32"}, GPT, marks=pytest.mark.slow),
    pytest.param("pp2", "dp2-replicated", {"mode": "fp32"}, {"activation": "geglu"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("before", "after", "precision", "model"), CASES)
def test_another_layout_takes_over_every_element(
    before: str, after: str, precision: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    require_carried_over(before, after, precision, model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [FP8, FP16, {"mode": "fp32"}], ids=["fp8", "fp16", "fp32"])
@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", ["one", "tp2dp2", "tp2pp2", "pp2vpp2", "dp2"])
def test_any_layout_takes_over_from_any(before: str, after: str, precision: dict[str, Any], tmp_path: Path) -> None:
    if before == after:
        pytest.skip("the same layout: exact, as tested elsewhere")
    require_carried_over(before, after, precision, GPT if after.endswith("2") else {}, tmp_path)


def test_scales_that_every_rank_had_for_itself_become_those_that_fit_all(tmp_path: Path) -> None:
    config = make_config("dp2", {**FP8, "amax_reduction": "off"}, {})
    train("dp2", config, tmp_path)
    saved = tmp_path / f"iter_{STEPS_BEFORE:07d}"
    (resumed,) = train("one", make_config("one", {**FP8, "amax_reduction": "off"}, {}), None, saved)
    assert any("largest amaxes, smallest scale" in note for note in resumed.notes)


def test_another_format_takes_over_the_weights_and_says_what_of_scales_it_does_not_use(tmp_path: Path) -> None:
    train("one", make_config("one", FP8, {}), tmp_path)
    saved = tmp_path / f"iter_{STEPS_BEFORE:07d}"
    (resumed,) = train("one", make_config("one", {"mode": "bf16"}, {}), None, saved)
    assert resumed.notes == ["the saved FP8 scaling state is not used: this run has no FP8"]
    (mxfp8,) = train("one", make_config("one", {"mode": "fp8", "fp8_recipe": "tensorwise"}, {}), None, saved)
    assert mxfp8.probe[2] == resumed.probe[2]


def test_a_checkpoint_of_another_model_is_refused_by_the_names_that_do_not_fit(tmp_path: Path) -> None:
    train("one", make_config("one", {"mode": "fp32"}, {}), tmp_path)
    saved = tmp_path / f"iter_{STEPS_BEFORE:07d}"
    for model, text in (
        ({"hidden_size": 32}, r"master\.final_norm\.weight has shape \[64\], this model's is \[32\]"),
        ({"add_bias_linear": True}, r"master\.layers\..*bias is missing"),
    ):
        with pytest.raises(RankError, match="belongs to another model") as caught:
            train("one", make_config("one", {"mode": "fp32"}, model), None, saved)
        assert re.search(text, str(caught.value))
