"""Scaling state as plain named tensors: saved, loaded without pickled classes, carried to other settings."""

from __future__ import annotations

import io

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.small_run import batches, run_small, small_config

Saved = dict[str, torch.Tensor]


def config_of(parallel: dict | None = None, **precision):
    parallel = {"sequence_parallel": (parallel or {}).get("tensor_model_parallel_size", 1) > 1, **(parallel or {})}
    precision = {"mode": "fp8", "fp8_amax_history_len": 4, **precision}
    return small_config(precision=precision, parallel=parallel, training={"global_batch_size": 4})


def through_a_file(saved: Saved) -> Saved:
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def train_and_save(config, num_steps: int) -> Saved:
    return run_small(config, num_steps, lambda parts: through_a_file(parts.precision.state_dict())).probe


def load(config, saved: Saved) -> tuple[list[str], Saved]:
    """What cannot be carried over, and the state as it then is."""

    def probe(parts):
        return parts.precision.load_state_dict(saved), parts.precision.state_dict()

    return run_small(config, 0, probe).probe


def union(parts: list[Saved]) -> Saved:
    return {name: value for part in parts for name, value in part.items()}


def assert_equal(left: Saved, right: Saved) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def test_only_plain_tensors_with_names_are_saved() -> None:
    (saved,) = run_on_ranks(1, train_and_save, config_of(), 2)
    assert all(type(value) is torch.Tensor for value in saved.values())
    assert saved["layers.0.self_attention.layernorm_qkv.scaling_fwd.amax_history"].shape == (4, 3)
    assert saved["layers.3.layernorm_mlp.scaling_bwd.scale"].shape == (4,)
    assert int(saved["num_updates"]) == 2
    assert float(saved["layers.0.self_attention.layernorm_qkv.scaling_fwd.scale"][0]) != 1.0


def continue_after(config, saved: Saved | None) -> list[float]:
    """Two steps before, the state replaced, two steps after."""

    def probe(parts):
        for _ in range(2):
            parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
        if saved is not None:
            for state in parts.precision.scaling_states():
                state.scale.fill_(3.0)
                state.amax_history.fill_(5.0)
            assert parts.precision.load_state_dict(saved) == []
        losses = []
        for _ in range(2):
            result = parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
            losses += [result.loss.reduced_mean(), result.grad_norm]
        return losses

    return run_small(config, 0, probe).probe


@pytest.mark.parametrize("interval", [1, 3])
def test_steps_after_loading_are_bit_equal(interval: int) -> None:
    config = config_of(fp8_interval=interval)
    (saved,) = run_on_ranks(1, state_after_two_steps, config)
    (undisturbed,) = run_on_ranks(1, continue_after, config, None)
    (restored,) = run_on_ranks(1, continue_after, config, saved)
    assert restored == undisturbed


def state_after_two_steps(config) -> Saved:
    """State after the two steps that `continue_after` makes first."""

    def probe(parts):
        for _ in range(2):
            parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
        return parts.precision.state_dict()

    return run_small(config, 0, probe).probe


def test_state_moves_between_layouts() -> None:
    wide = config_of({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})
    saved = union(run_on_ranks(4, train_and_save, wide, 2))
    ((notes, loaded),) = run_on_ranks(1, load, config_of(), saved)
    assert notes == []
    assert_equal(loaded, saved)
    back = run_on_ranks(4, load, wide, loaded)
    assert all(notes == [] for notes, _ in back)
    assert_equal(union([state for _, state in back]), saved)


def test_without_reduction_each_rank_gets_its_own_back() -> None:
    config = config_of(amax_reduction="off")
    parts = run_on_ranks(2, train_and_save, config, 2)
    own = "layers.0.self_attention.layernorm_qkv.scaling_fwd.scale@tp0of1.dp"
    assert f"{own}0of2" in parts[0]
    assert f"{own}1of2" in parts[1]
    saved = union(parts)
    assert any(not torch.equal(saved[name], saved[name.replace("dp0", "dp1")]) for name in saved if "dp0" in name)
    for part, (notes, loaded) in zip(parts, run_on_ranks(2, load, config, saved), strict=True):
        assert notes == []
        assert_equal(loaded, part)


def test_state_of_ranks_on_their_own_is_merged_where_amaxes_are_reduced() -> None:
    saved = union(run_on_ranks(2, train_and_save, config_of(amax_reduction="off"), 2))
    ((notes, loaded),) = run_on_ranks(1, load, config_of(), saved)
    name = "layers.2.layernorm_mlp.scaling_bwd"
    assert f"{name}: merged from 2 ranks (largest amaxes, smallest scale)" in notes
    both = [saved[f"{name}.amax_history@tp0of1.dp{rank}of2"] for rank in (0, 1)]
    assert torch.equal(loaded[f"{name}.amax_history"], torch.maximum(*both))


@pytest.mark.parametrize(("length", "dropped"), [(2, 2), (3, 1), (9, 0)])
def test_another_history_length(length: int, dropped: int) -> None:
    (saved,) = run_on_ranks(1, train_and_save, config_of(), 3)
    ((notes, loaded),) = run_on_ranks(1, load, config_of(fp8_amax_history_len=length), saved)
    name = "layers.0.self_attention.proj.scaling_fwd"
    expected = f"{name}: the history is shorter and loses its {dropped} oldest amaxes"
    assert (expected in notes) == (dropped > 0)
    history, before = loaded[f"{name}.amax_history"], saved[f"{name}.amax_history"]
    kept = min(length, 4) - 1
    assert torch.equal(history[-kept:], before[-kept:])
    assert history.shape[0] == length
    assert not history[:-kept].any()
    assert torch.equal(loaded[f"{name}.scale"], saved[f"{name}.scale"])


def test_another_format_and_margin_convert_the_scales() -> None:
    (saved,) = run_on_ranks(1, train_and_save, config_of(), 2)
    ((notes, loaded),) = run_on_ranks(1, load, config_of(fp8_format="e4m3", fp8_margin=1), saved)
    assert len(notes) == 1
    assert "scales converted" in notes[0]
    name = "layers.1.layernorm_mlp.scaling"
    assert torch.equal(loaded[f"{name}_fwd.scale"], saved[f"{name}_fwd.scale"] / 2)
    assert torch.allclose(loaded[f"{name}_bwd.scale"], saved[f"{name}_bwd.scale"] / 128 / 2, rtol=1e-6, atol=0)


def test_what_cannot_be_carried_over_is_said() -> None:
    (saved,) = run_on_ranks(1, train_and_save, config_of(bf16_layers=[1]), 2)
    ((notes, _),) = run_on_ranks(1, load, config_of(bf16_layers=[3]), saved)
    assert len([note for note in notes if note.startswith("layers.1.") and "starting from scratch" in note]) == 6
    assert "layers.3 runs in BF16 here: its scaling state is not used" in notes
    ((notes, _),) = run_on_ranks(1, load, small_config(precision={"mode": "bf16"}), saved)
    assert notes == ["the saved FP8 scaling state is not used: this run has no FP8"]
    ((notes, _),) = run_on_ranks(1, load, config_of(), {})
    assert notes == ["no FP8 scaling state was saved: all scales start from scratch"]


def test_state_of_another_model_is_refused() -> None:
    (saved,) = run_on_ranks(1, train_and_save, config_of(), 1)
    name = "layers.0.layernorm_mlp.scaling_fwd.amax_history"
    with pytest.raises(AssertionError, match="the state belongs to another model"):
        run_on_ranks(1, load, config_of(), {**saved, name: saved[name][:, :3]})


def test_a_scale_of_a_tiny_amax_stays_finite_in_a_larger_unit() -> None:
    (saved,) = run_on_ranks(1, train_and_save, config_of(fp8_margin=4), 1)
    largest = torch.finfo(torch.float32).max
    name = "layers.1.layernorm_mlp.scaling_bwd.scale"
    saved[name] = torch.full_like(saved[name], largest)
    ((_, loaded),) = run_on_ranks(1, load, config_of(fp8_margin=0), saved)
    assert loaded[name].tolist() == [largest] * len(saved[name])
