"""FP16: losses beside FP32's, the loss scale's course, what a skipped step changes, and when a run gives up."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.precision.gradients import before_reduction, parameters, whole_state
from tests.ranks import RankError, run_on_ranks
from tests.small_run import SEQ_LENGTH, VOCAB_SIZE, batches, run_small, small_config

NUM_STEPS = 5
TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS = [
    pytest.param(1, {}, id="1"),
    pytest.param(4, TP2_PP2, id="tp2pp2"),
    pytest.param(2, {}, id="dp2"),
    pytest.param(2, {"use_distributed_optimizer": False}, id="dp2-not-distributed"),
    pytest.param(2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, id="pp2vpp2"),
]


def fp16(scaling: dict[str, Any], parallel: dict[str, Any] | None = None, **sections: dict[str, Any]):
    sections = {"training": {"global_batch_size": 8}, **sections}
    return small_config(precision={"mode": "fp16", **scaling}, parallel=parallel or {}, **sections)


def tiny(scaling: dict[str, Any], parallel: dict[str, Any] | None = None):
    """A step takes a few hundredths of a second."""
    training = {"micro_batch_size": 1, "global_batch_size": 2, "train_iters": 60}
    return fp16(scaling, parallel, model={"num_layers": 1}, training=training)


@pytest.fixture(scope="module")
def fp32_losses() -> list[float]:
    (record,) = run_on_ranks(1, run_small, small_config(training={"global_batch_size": 8}), NUM_STEPS)
    return [step.loss for step in record.steps]


@pytest.mark.parametrize(("world_size", "parallel"), LAYOUTS)
def test_losses_follow_fp32(world_size: int, parallel: dict[str, Any], fp32_losses: list[float]) -> None:
    records = run_on_ranks(world_size, run_small, fp16({"initial_loss_scale": 2.0**12}, parallel), NUM_STEPS)
    for record in records:
        assert all(step.grad_norm is not None for step in record.steps)
        assert [step.loss for step in record.steps] == pytest.approx(fp32_losses, abs=1e-3)


@pytest.mark.parametrize("scaling", [{"loss_scale": 1.0}, {"loss_scale": 2.0**11}, {"initial_loss_scale": 2.0**8}])
def test_the_scale_does_not_change_what_is_learned(scaling: dict[str, Any], fp32_losses: list[float]) -> None:
    """A scale that is left in the gradients would change the clipping, and Adam's epsilon."""
    (record,) = run_on_ranks(1, run_small, fp16(scaling), NUM_STEPS)
    assert [step.loss for step in record.steps] == pytest.approx(fp32_losses, abs=1e-3)


def formats(parts) -> dict[str, set[str]]:
    config = parts.chunks[0].config
    fused = parts.optimizer.optimizer
    return {
        "parameters": {str(p.dtype) for p in parameters(parts)},
        "gradients": {str(p.main_grad.dtype) for p in parameters(parts)},
        "masters": {str(p.dtype) for group in fused.param_groups for p in group["params"]},
        "moments": {str(value.dtype) for state in fused.state.values() for value in state.values()},
        "between stages": {str(config.pipeline_dtype)},
        "scaler": {type(parts.optimizer.chained_optimizers[0].grad_scaler).__name__},
    }


def test_formats() -> None:
    (record,) = run_on_ranks(1, run_small, fp16({}), 1, formats)
    assert record.probe == {
        "parameters": {"torch.float16"},
        "gradients": {"torch.float32"},
        "masters": {"torch.float32"},
        # The first step, at a scale of 2^32, was skipped: there are none yet.
        "moments": set(),
        "between stages": {"torch.float16"},
        "scaler": {"DynamicGradScaler"},
    }
    (record,) = run_on_ranks(1, run_small, fp16({"loss_scale": 2.0**10}), 1, formats)
    assert record.probe["moments"] == {"torch.float32"}
    assert record.probe["scaler"] == {"ConstantGradScaler"}


def reference_scales(overflows: Sequence[bool], scaling: dict[str, Any]) -> Iterator[float]:
    """The scale after each step, from the keys' documentation alone.

    `hysteresis`: overflows that are borne before the scale halves; those borne are forgotten when the scale grows.
    `loss_scale_window`: steps in a row without overflow after which it doubles. Never below `min_loss_scale`.
    """
    scale, clean, borne = scaling["initial_loss_scale"], 0, 0
    for overflow in overflows:
        if overflow:
            clean, borne = 0, borne + 1
            if borne >= scaling["hysteresis"]:
                scale = max(scale / 2, scaling["min_loss_scale"])
        else:
            clean += 1
            if clean == scaling["loss_scale_window"]:
                scale, clean, borne = scale * 2, 0, 0
        yield scale


def scripted(overflows: str, scaling: dict[str, Any]) -> list[tuple[float, bool, float | None]]:
    """Steps whose gradients overflow where the script says `x`: scale after each, skipped or not, gradient norm."""

    def probe(parts) -> list[tuple[float, bool, float | None]]:
        script = iter(overflows)

        def poison() -> None:
            if next(script) == "x":
                parameters(parts)[0].main_grad.view(-1)[3] = float("inf")

        before_reduction(parts, poison)
        course = []
        for _ in overflows:
            result = parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
            course.append((float(parts.optimizer.get_loss_scale()), result.skipped, result.grad_norm))
        return course

    return run_small(tiny(scaling), 0, probe).probe


@pytest.mark.parametrize(
    ("overflows", "scaling"),
    [
        # Growth twice, then down to the minimum and further overflows there, then up again.
        ("......xxxxxxx...x..xx.......", {"loss_scale_window": 3, "hysteresis": 2, "min_loss_scale": 64.0}),
        # Hysteresis is not used up by overflows with clean steps between them only once the scale has grown.
        ("x..x..x....x...x", {"loss_scale_window": 4, "hysteresis": 3, "min_loss_scale": 1.0}),
        ("xx.x", {"loss_scale_window": 1, "hysteresis": 1, "min_loss_scale": 1.0}),
        # Clean steps count in a row.
        (".x" * 6 + "..", {"loss_scale_window": 2, "hysteresis": 4, "min_loss_scale": 1.0}),
    ],
)
def test_course_of_the_loss_scale(overflows: str, scaling: dict[str, Any]) -> None:
    scaling = {"initial_loss_scale": 256.0, **scaling}
    (course,) = run_on_ranks(1, scripted, overflows, scaling)
    flags = [flag == "x" for flag in overflows]
    assert [scale for scale, _, _ in course] == list(reference_scales(flags, scaling))
    assert [skipped for _, skipped, _ in course] == flags
    assert [norm is None for _, _, norm in course] == flags


def found_by_itself() -> list[tuple[float, bool]]:
    def probe(parts) -> list[tuple[float, bool]]:
        course = []
        for _ in range(12):
            result = parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
            course.append((float(parts.optimizer.get_loss_scale()), result.skipped))
        return course

    return run_small(tiny({"initial_loss_scale": 2.0**20, "hysteresis": 1}), 0, probe).probe


def test_a_scale_that_is_too_high_falls_until_gradients_are_finite() -> None:
    """No poison here: FP16's own overflow, in the stand-in's casts."""
    (course,) = run_on_ranks(1, found_by_itself)
    skipped = [was_skipped for _, was_skipped in course]
    num_skipped = skipped.index(False)
    # Gradients of single logits are almost 1, times the scale: above FP16's largest value until the scale is 2^15.
    assert num_skipped >= 5
    assert course[num_skipped][0] == 2.0 ** (20 - num_skipped)
    assert sum(skipped[num_skipped:]) <= 2


def skipped_step(world_rank: int, value: float) -> dict[str, Any]:
    """A step, one with `value` in one gradient of rank `world_rank`, and another step."""

    def probe(parts) -> dict[str, Any]:
        poisoned = False

        def poison() -> None:
            if poisoned and parts.groups.rank == world_rank:
                # The last parameter: on one pipeline stage and, the head's or a layer's, on one tensor-parallel rank.
                parameters(parts)[-1].main_grad.view(-1)[-1] = value

        before_reduction(parts, poison)
        step = lambda: parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)  # noqa: E731
        step()
        before = whole_state(parts)
        poisoned = True
        result = step()
        after = whole_state(parts)
        poisoned = False
        last = step()
        return {
            "skipped": [result.skipped, last.skipped],
            "grad_norm": [result.grad_norm, last.grad_norm],
            "untouched": before.keys() == after.keys() and all(bool((before[k] == after[k]).all()) for k in before),
            "size": len(before),
            "moved on": sum(not bool((after[k] == v).all()) for k, v in whole_state(parts).items()),
            "scale": float(parts.optimizer.get_loss_scale()),
        }

    return probe


def run_skipped_step(parallel: dict[str, Any], world_rank: int, value: float) -> dict[str, Any]:
    training = {"micro_batch_size": 1, "global_batch_size": 2}
    config = fp16({"initial_loss_scale": 1024.0, "hysteresis": 1}, parallel, training=training)
    return run_small(config, 0, skipped_step(world_rank, value)).probe


@pytest.mark.parametrize(("world_size", "parallel"), LAYOUTS)
def test_an_overflow_on_one_rank_is_skipped_by_all(world_size: int, parallel: dict[str, Any]) -> None:
    for world_rank, value in {0: float("nan"), world_size - 1: float("inf")}.items():
        records = run_on_ranks(world_size, run_skipped_step, parallel, world_rank, value)
        for record in records:
            assert record["skipped"] == [True, False]
            assert record["grad_norm"][0] is None
            assert record["grad_norm"][1] == pytest.approx(records[0]["grad_norm"][1])
            assert record["untouched"]
            assert record["size"] > 20
            assert record["moved on"] > 0.5 * record["size"]
            assert record["scale"] == 512.0


class Samples:
    """Random samples, all of whose tokens count."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        row = torch.randint(0, VOCAB_SIZE, (SEQ_LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return {
            "tokens": row[:-1],
            "labels": row[1:],
            "loss_mask": torch.ones(SEQ_LENGTH),
            "position_ids": torch.arange(SEQ_LENGTH),
        }


def looped(config: Any, directory: str, poisoned_steps: frozenset[int] = frozenset()) -> None:
    """The training loop itself over `Samples`; rank 0 writes `metrics.jsonl` and `console.log`."""
    import torch

    from megatron_fp8.data.dataset import Datasets
    from megatron_fp8.report.console import ConsoleSink
    from megatron_fp8.report.record import JsonLines, Recorder
    from megatron_fp8.report.start_clock import StartClock
    from megatron_fp8.train.loop import train

    rank, iterations = torch.distributed.get_rank(), config.training.train_iters
    sinks = [JsonLines(Path(directory) / "metrics.jsonl"), ConsoleSink(Path(directory) / "console.log", iterations)]
    samples = Samples()
    num_samples = iterations * config.training.global_batch_size

    def probe(parts) -> None:
        step = 0

        def poison() -> None:
            nonlocal step
            step += 1
            if step in poisoned_steps and rank == torch.distributed.get_world_size() - 1:
                parameters(parts)[0].main_grad.view(-1)[0] = float("inf")

        before_reduction(parts, poison)
        parts = replace(parts, recorder=Recorder(sinks if rank == 0 else []))
        train(parts, Datasets(samples, (), num_samples), StartClock())  # type: ignore[arg-type]

    run_small(config, 0, probe)


def loop_config(precision: dict[str, Any], train_iters: int, log_interval: int = 1, **optimizer: Any):
    return small_config(
        model={"num_layers": 1},
        precision=precision,
        training={"micro_batch_size": 1, "global_batch_size": 2, "train_iters": train_iters, "eval_iters": 0},
        optimizer={"lr": 1e-3, "lr_warmup_iters": 10, "lr_decay_iters": 20, **optimizer},
        logging={"log_interval": log_interval},
    )


def records(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "train"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_skipped_step_in_the_record(world_size: int, tmp_path: Path) -> None:
    config = loop_config({"mode": "fp16", "initial_loss_scale": 256.0, "hysteresis": 1}, train_iters=6)
    run_on_ranks(world_size, looped, config, str(tmp_path), frozenset({2, 3}))
    seen = records(tmp_path)
    assert [record["skipped-iterations"] for record in seen] == [0, 1, 2, 2, 2, 2]
    assert [record["loss-scale"] for record in seen] == [256.0, 128.0, 64.0, 64.0, 64.0, 64.0]
    assert [record["consumed-samples"] for record in seen] == [2, 4, 6, 8, 10, 12]
    # The rate that a step used: warm-up by 1e-4 a step; skipped steps do not advance it.
    assert [record["learning-rate"] for record in seen] == pytest.approx([0, 1e-4, 1e-4, 1e-4, 2e-4, 3e-4])
    for record in seen:
        withheld = record["iteration"] in (2, 3)
        assert (record["grad-norm"] is None) == (record["lm loss"] is None) == withheld
    console = (tmp_path / "console.log").read_text().splitlines()
    shown = [line for line in console if line.startswith("iteration")]
    assert "| loss-scale 256 |" in shown[0]
    assert "skipped" not in shown[0]
    assert "lm loss - | grad-norm - | learning-rate 1.00e-04 | loss-scale 128 | skipped-iterations 1 |" in shown[1]


def test_the_loss_of_an_interval_leaves_out_skipped_steps(tmp_path: Path) -> None:
    scaling = {"mode": "fp16", "initial_loss_scale": 256.0}
    (tmp_path / "each").mkdir()
    (tmp_path / "all").mkdir()
    run_on_ranks(1, looped, loop_config(scaling, 4), str(tmp_path / "each"), frozenset({2}))
    run_on_ranks(1, looped, loop_config(scaling, 4, log_interval=4), str(tmp_path / "all"), frozenset({2}))
    each = [record["lm loss"] for record in records(tmp_path / "each")]
    (together,) = records(tmp_path / "all")
    assert together["lm loss"] == pytest.approx((each[0] + each[2] + each[3]) / 3)
    assert together["skipped-iterations"] == 1


def test_bf16_has_no_loss_scale_in_the_record(tmp_path: Path) -> None:
    run_on_ranks(1, looped, loop_config({"mode": "bf16"}, 2), str(tmp_path))
    assert all("loss-scale" not in record and record["skipped-iterations"] == 0 for record in records(tmp_path))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"initial_loss_scale": 4.0, "min_loss_scale": 2.0, "hysteresis": 1}, "precision.min_loss_scale=2"),
        ({"loss_scale": 512.0}, "precision.loss_scale=512 is constant"),
    ],
)
def test_a_run_that_only_skips_ends(scaling: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = loop_config({"mode": "fp16", **scaling}, train_iters=40)
    with pytest.raises(RankError, match="in 10 consecutive steps") as error:
        run_on_ranks(2, looped, config, str(tmp_path), frozenset(range(4, 41)))
    assert message in str(error.value)
    assert "precision.mode=bf16" in str(error.value)
    # The first overflow lowers a dynamic scale to its minimum; it and nine more follow under a scale that cannot fall.
    assert records(tmp_path)[-1]["iteration"] == 12


def test_overflows_with_progress_between_them_do_not_end_a_run(tmp_path: Path) -> None:
    config = loop_config({"mode": "fp16", "loss_scale": 512.0}, train_iters=24)
    run_on_ranks(1, looped, config, str(tmp_path), frozenset(set(range(1, 25)) - {1, 11, 21}))
    assert records(tmp_path)[-1]["skipped-iterations"] == 21


@pytest.mark.parametrize("mode", ["bf16", "fp8", "fp32"])
def test_gradients_that_are_not_finite_end_a_run_without_a_loss_scale(mode: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"grad-norm is (inf|nan) at iteration 3"):
        run_on_ranks(2, looped, loop_config({"mode": mode}, 6), str(tmp_path), frozenset({3}))
    assert len(records(tmp_path)) == 2
