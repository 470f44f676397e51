"""What a run records of its FP8 tensors, over ranks, and layers that leave FP8 and return.

A layer is made bad through one rank's share of it: tensorwise scaling with an outlier in one rank's weight, which
flushes the rest of that rank's weight to zero.
"""

from __future__ import annotations

import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_fp8.config.schema import Config
from megatron_fp8.report.console import ConsoleSink
from tests.ranks import run_on_ranks
from tests.small_run import small_config

BAD_LAYER = 2
OUTLIER = 3e5


class Records:
    """A sink that keeps what it is given, but for the time."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, record: Any) -> None:
        self.records.append({name: value for name, value in record.items() if name != "time"})

    def close(self) -> None:
        pass


def _parts(config: Config, sink: Records) -> Any:
    import torch

    from megatron_fp8 import device as devices
    from megatron_fp8.config.layout import derive_layout
    from megatron_fp8.report.record import Recorder
    from tests.small_run import VOCAB_SIZE

    device = devices.prepare()
    from megatron_fp8.train.setup import build_parts

    layout = derive_layout(config, torch.distributed.get_world_size(), VOCAB_SIZE)
    return build_parts(config, layout, VOCAB_SIZE, device, Recorder([sink]))


def _train(parts: Any, first: int, last: int) -> list[float]:
    """The given steps; losses and gradient norms."""
    from tests.small_run import batches

    numbers = []
    for iteration in range(first, last + 1):
        with parts.health.before_step(iteration):
            result = parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)
        for event, values in parts.health.after_step(iteration, not result.skipped):
            parts.recorder.write(event, values)
        numbers += [result.loss.reduced_mean(), result.grad_norm]
    return numbers


def config(precision: dict[str, Any], parallel: dict[str, Any] | None = None, log_interval: int = 100) -> Config:
    return small_config(
        precision={"mode": "fp8", **precision},
        parallel=parallel or {},
        training={"global_batch_size": 4},
        logging={"log_interval": log_interval},
    )


LAYOUTS = {
    "one": (1, {}),
    "tp2 dp2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2 dp2": (4, {"pipeline_model_parallel_size": 2}),
}


def _scales(config: Config) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Records of three steps, and this rank's scales and newest amaxes by TE's slots."""
    sink = Records()
    parts = _parts(config, sink)
    _train(parts, 1, 3)
    states = {}
    for state in parts.precision.scaling_states():
        states[state.name] = [state.scale.tolist(), state.amax_history.tolist()]
    return sink.records, states


@pytest.mark.parametrize("layout", LAYOUTS)
def test_delayed_scales_and_head_room(layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    watched = config({"fp8_amax_history_len": 4, "fp8_margin": 1, "fp8_health_interval": 0}, parallel, log_interval=3)
    ranks = run_on_ranks(world_size, _scales, watched)
    states = {name: state for _, of_rank in ranks for name, state in of_rank.items()}
    # Every rank has the record, of which rank 0's is written.
    assert all(records == ranks[0][0] for records, _ in ranks)
    (record,) = ranks[0][0]
    assert (record.pop("event"), record.pop("iteration")) == ("fp8", 3)
    # 4 layers of 4 linear layers with 3 tensors of 4 series; outputs and input gradients are not quantized.
    assert len(record) == 4 * 4 * 3 * 4
    for layer in range(4):
        for tensor, direction, slot in (
            ("self_attention.proj/input", "self_attention.proj.scaling_fwd", 0),
            ("self_attention.layernorm_qkv/weight", "self_attention.layernorm_qkv.scaling_fwd", 1),
            ("layernorm_mlp.fc2/input", "layernorm_mlp.scaling_fwd", 3),
            ("layernorm_mlp.fc2/weight", "layernorm_mlp.scaling_fwd", 4),
            ("layernorm_mlp.fc2/grad_output", "layernorm_mlp.scaling_bwd", 2),
        ):
            scales, history = states[f"layers.{layer}.{direction}"]
            name = f"fp8/layers.{layer}/{tensor}"
            assert record[f"{name}/scale"] == scales[slot]
            assert record[f"{name}/amax"] == history[-1][slot] > 0
            assert record[f"{name}/history-max"] == max(row[slot] for row in history)
            # Three steps fit into the history: the scale is made from its maximum, with one bit to spare.
            assert record[f"{name}/head-room-bits"] == pytest.approx(1, abs=1e-5)


def test_history_of_one_step() -> None:
    ((records, states),) = run_on_ranks(1, _scales, config({"fp8_amax_history_len": 1}, log_interval=3))
    record = records[0]
    name = "fp8/layers.0/layernorm_mlp.fc1/input"
    scale = states["layers.0.layernorm_mlp.scaling_fwd"][0][0]
    assert record[f"{name}/amax"] == record[f"{name}/history-max"] == pytest.approx(448 / scale)
    assert record[f"{name}/head-room-bits"] == pytest.approx(0, abs=1e-5)


def _weight_scales(config: Config) -> tuple[list[dict[str, Any]], float]:
    sink = Records()
    parts = _parts(config, sink)
    _train(parts, 1, 1)
    weight = parts.precision.layers[0].self_attention.proj.weight.detach().float()
    _train(parts, 2, 2)
    return sink.records, float(weight.abs().max())


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_scales_of_recipes_that_keep_none(recipe: str) -> None:
    watched = small_config(
        model={"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256},
        precision={"mode": "fp8", "fp8_recipe": recipe},
        logging={"log_interval": 2},
    )
    ((records, amax),) = run_on_ranks(1, _weight_scales, watched)
    record = records[0]
    assert len(record) == 2 + 2 * 4 * 3 * 2
    found = record["fp8/layers.0/self_attention.proj/weight/amax"]
    if recipe == "tensorwise":
        assert found == pytest.approx(amax, rel=1e-6)
    else:
        assert amax <= found < 2 * amax
    assert record["fp8/layers.0/self_attention.proj/weight/scale"] == pytest.approx(448 / found)
    for name, value in record.items():
        if name.endswith("/grad_output/amax"):
            assert 0 < value < 100, name


def test_weights_that_are_fp8_themselves_have_scales() -> None:
    watched = config({"fp8_recipe": "tensorwise", "fp8_param_gather": True, "fp8_health_interval": 0}, log_interval=3)
    ((records, _),) = run_on_ranks(1, _scales, watched)
    assert len(records[0]) == 2 + 4 * 4 * 3 * 2
    for name, value in records[0].items():
        if name.endswith("/weight/amax"):
            assert 0.01 < value < 1, name


FALLBACK = {
    "fp8_recipe": "tensorwise",
    "fp8_health_interval": 1,
    "fp8_fallback": True,
    "fp8_fallback_num_checks": 2,
    "fp8_fallback_num_healthy_checks": 2,
    "fp8_fallback_max_clipped": 1.0,
    "fp8_fallback_max_flushed": 0.4,
    "fp8_fallback_max_error": 10.0,
}


def _fall_and_return(config: Config) -> tuple[list[dict[str, Any]], list[list[int]], list[dict[str, list[int]]]]:
    """Five steps with an outlier in one rank's weight, which is taken out after the third."""
    import torch

    sink = Records()
    parts = _parts(config, sink)
    layer = parts.precision.layers.get(BAD_LAYER)
    # The last rank that has the layer.
    spoils = layer is not None and parts.groups.tp_dp.rank() == parts.groups.tp_dp.size() - 1
    running, states = [], []
    for iteration in range(1, 6):
        if spoils:
            assert layer is not None
            with torch.no_grad():
                layer.layernorm_mlp.fc1_weight[0, 0] = OUTLIER if iteration <= 3 else 0.01
        _train(parts, iteration, iteration)
        running.append([number for number in range(4) if parts.precision.runs_in_fp8(number)])
        states.append(parts.health.state_dict())
    return sink.records, running, states


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_bad_share_takes_the_layer_out_of_fp8_everywhere(layout: str) -> None:
    world_size, parallel = LAYOUTS[layout]
    # One rank flushes all of its share, those of the stage's other ranks are whole.
    share = parallel.get("pipeline_model_parallel_size", 1) / world_size
    watched = config({**FALLBACK, "fp8_fallback_max_flushed": 0.9 * share}, parallel)
    ranks = run_on_ranks(world_size, _fall_and_return, watched)
    assert all(of_rank[1:] == ranks[0][1:] for of_rank in ranks)
    records, running, states = ranks[0]
    whole, without = [0, 1, 2, 3], [0, 1, 3]
    # The checks of steps 1 and 2 are bad; those of 4 and 5 find it healthy again.
    assert running == [whole, without, without, without, whole]
    assert states[0] == {"fallen_back": [], "counted_layers": [BAD_LAYER], "counts": [1]}
    assert states[-1] == {"fallen_back": [], "counted_layers": [], "counts": []}
    left, returned = [record for record in records if record["event"] == "fp8-fallback"]
    value = left.pop("value")
    assert left == {
        "event": "fp8-fallback",
        "iteration": 2,
        "layer": BAD_LAYER,
        "runs in": "bf16",
        "tensor": f"layers.{BAD_LAYER}/layernorm_mlp.fc1/weight",
        "quantity": "flushed",
        "limit": 0.9 * share,
    }
    assert value == pytest.approx(share, rel=0.02)
    assert returned == {"event": "fp8-fallback", "iteration": 5, "layer": BAD_LAYER, "runs in": "fp8"}
    checks = [record for record in records if record["event"] == "fp8-check"]
    assert [record["iteration"] for record in checks] == [1, 2, 3, 4, 5]
    assert [record["fallen-back-layers"] for record in checks] == [[], [], [2], [2], [2]]
    # What FP8 would do is known of a layer in BF16 too.
    assert all(len(record) == 3 + 4 * 4 * 3 * 4 for record in checks)


def _spoilt_steps(parts: Any, num_steps: int) -> list[float]:
    import torch

    numbers = []
    for iteration in range(1, num_steps + 1):
        # The optimizer writes weights anew after every step.
        with torch.no_grad():
            parts.precision.layers[BAD_LAYER].layernorm_mlp.fc1_weight[0, 0] = OUTLIER
        numbers += _train(parts, iteration, iteration)
    return numbers


def _resumed(config: Config) -> tuple[list[int], list[int], bool]:
    """A layer falls back; another watch takes the decision over: what was saved, what then runs in FP8."""
    parts = _parts(config, Records())
    _spoilt_steps(parts, 2)
    saved = parts.health.state_dict()
    parts.precision.fall_back(())
    other = type(parts.health)(parts.precision, parts.groups, 100)
    other.load_state_dict(saved)
    running = [number for number in range(4) if parts.precision.runs_in_fp8(number)]
    return saved["fallen_back"], running, other.state_dict() == saved


def test_a_decision_is_taken_over_from_its_state() -> None:
    (found,) = run_on_ranks(1, _resumed, config(FALLBACK))
    assert found == ([BAD_LAYER], [0, 1, 3], True)


def _seeded(config: Config) -> tuple[list[list[float]], list[dict[str, Any]]]:
    """Scale and newest amax of a weight after each step, and the amax that it had in it; the records."""
    import torch

    sink = Records()
    parts = _parts(config, sink)
    module = parts.precision.layers[BAD_LAYER].self_attention.proj
    state = module.fp8_meta["scaling_fwd"]
    seen = []
    for iteration in range(1, 10):
        with torch.no_grad():
            # Until it has left FP8 it grows faster than the scale follows, and is clipped.
            module.weight.mul_(8.0 ** min(iteration, 4) if iteration <= 4 else 1)
        amax = float(module.weight.detach().float().abs().max())
        _train(parts, iteration, iteration)
        seen.append([float(state.scale[1]), float(state.amax_history[-1, 1]), amax])
    return seen, sink.records


def test_a_layer_returns_with_scales_of_its_tensors_as_they_are() -> None:
    limits = {"fp8_fallback_max_clipped": 0.05, "fp8_health_interval": 2}
    watched = config({**FALLBACK, **limits, "fp8_recipe": "delayed", "fp8_amax_history_len": 2})
    ((seen, records),) = run_on_ranks(1, _seeded, watched)
    checks = [record["iteration"] for record in records if record["event"] == "fp8-check"]
    assert checks == [2, 4, 6, 8]
    changes = [record for record in records if record["event"] == "fp8-fallback" and record["layer"] == BAD_LAYER]
    assert [(change["iteration"], change["runs in"]) for change in changes] == [(4, "bf16"), (8, "fp8")]
    left, (scale, newest, amax) = seen[3], seen[7]
    assert newest == pytest.approx(amax, rel=1e-6)
    assert scale == pytest.approx(448 / amax, rel=1e-6)
    # The scale with which it had left is of a tensor a thousand times as large.
    assert left[0] < scale / 1000


def _seeded_with(config: Config, amax: float) -> tuple[float, float]:
    """Scale and newest amax of an operand that returns with `amax`."""
    parts = _parts(config, Records())
    from megatron_fp8.precision.operand_scales import seed_delayed_scales
    from megatron_fp8.precision.operands import operands

    operand = next(iter(operands(parts.precision.layers)))
    seed_delayed_scales([operand], {operand.name: amax}, parts.precision.policy.fp8)
    state = operand.module.fp8_meta[operand.direction]
    return float(state.scale[operand.slot]), float(state.amax_history[-1, operand.slot])


def test_a_tiny_tensor_returns_with_a_finite_scale() -> None:
    import torch

    ((scale, newest),) = run_on_ranks(1, _seeded_with, config({"fp8_amax_history_len": 2}), 2.0**-130)
    assert scale == torch.finfo(torch.float32).max
    assert newest == 2.0**-130


def _recomputed(config: Config) -> tuple[list[float], list[int]]:
    parts = _parts(config, Records())
    return _spoilt_steps(parts, 4), parts.health.state_dict()["fallen_back"]


def test_recomputation_sees_the_decision_of_its_forward_pass() -> None:
    plain, recomputed = (
        run_on_ranks(
            1,
            _recomputed,
            small_config(
                model={"recompute_granularity": recompute},
                precision={"mode": "fp8", **FALLBACK},
                training={"global_batch_size": 4},
                logging={"log_interval": 100},
            ),
        )[0]
        for recompute in ("none", "full")
    )
    assert plain[1] == [BAD_LAYER]
    assert all(math.isfinite(number) for number in plain[0])
    assert recomputed == plain


def _bf16_modes(config: Config) -> list[dict[str, Any]]:
    sink = Records()
    parts = _parts(config, sink)
    _train(parts, 1, 2)
    return sink.records


def test_other_modes_record_nothing() -> None:
    assert run_on_ranks(1, _bf16_modes, config({"mode": "bf16", "fp8_health_interval": 1}, log_interval=1)) == [[]]


def test_the_console_shows_decisions_and_no_tensors(tmp_path: Path) -> None:
    console = ConsoleSink(tmp_path / "console.log", 100, console=Console(file=StringIO()))
    console.write({"event": "fp8", "iteration": 10, "fp8/layers.0/x/input/scale": 1.0})
    console.write({"event": "fp8-check", "iteration": 10, "fp8/layers.0/x/input/error": 0.1})
    reason = {"tensor": "layers.2/x/weight", "quantity": "flushed", "value": 0.75, "limit": 0.5}
    console.write({"event": "fp8-fallback", "iteration": 10, "layer": 2, "runs in": "bf16", **reason})
    console.write({"event": "fp8-fallback", "iteration": 20, "layer": 2, "runs in": "fp8"})
    console.close()
    assert (tmp_path / "console.log").read_text().splitlines() == [
        "iteration 10 | layer 2 runs in bf16 from now on: layers.2/x/weight flushed 0.75 > 0.5",
        "iteration 20 | layer 2 runs in fp8 from now on",
    ]
