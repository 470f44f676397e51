"""What the probe measures, against casts by ml_dtypes of tensors caught by hooks; and that it disturbs nothing.

The tensors are those of the `proj` and `layernorm_qkv` modules of the second layer of a small model, over two
micro-batches. Scales are computed here, from the definitions of the recipes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from megatron_fp8.config.schema import Config
from tests.ranks import run_on_ranks
from tests.small_run import small_config

LAYER = 1
PROJ, QKV = "layers.1/self_attention.proj", "layers.1/self_attention.layernorm_qkv"


def config(recipe: str, recompute: str = "none", **precision: Any) -> Config:
    return small_config(
        model={
            "num_layers": 2,
            "hidden_size": 128,
            "ffn_hidden_size": 256,
            "seq_length": 64,
            "recompute_granularity": recompute,
        },
        precision={"mode": "fp8", "fp8_recipe": recipe, **precision},
        training={"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 10},
    )


@dataclass
class Caught:
    """Tensors of a step as FP32 arrays `[rows, columns]`, one a micro-batch; weights once. Scales: before it."""

    tensors: dict[str, list[np.ndarray]]
    scales: dict[str, float]
    measured: dict[str, Any]


def _parts(config: Config) -> Any:
    from megatron_fp8 import device as devices
    from megatron_fp8.config.layout import derive_layout
    from megatron_fp8.report.record import Recorder
    from tests.small_run import VOCAB_SIZE

    device = devices.prepare()
    from megatron_fp8.train.setup import build_parts

    return build_parts(config, derive_layout(config, 1, VOCAB_SIZE), VOCAB_SIZE, device, Recorder([]))


def _step(parts: Any) -> Any:
    from tests.small_run import batches

    return parts.stepper.train(parts.optimizer, batches(parts), parts.batches.shape)


def _measure(config: Config, shadow: bool) -> Caught:
    """One step without the probe, spoilt scales and an outlier in the weight, and one with it."""
    import torch

    parts = _parts(config)
    from megatron_fp8.precision.operands import operands
    from megatron_fp8.precision.policy import build_policy
    from megatron_fp8.precision.probe import TensorProbe
    from megatron_fp8.precision.te_recipe import fresh_quantizer

    _step(parts)
    layer = parts.precision.layers[LAYER]
    modules = {PROJ: layer.self_attention.proj, QKV: layer.self_attention.layernorm_qkv}
    scales = {}
    for operand in operands({LAYER: layer}):
        state = operand.module.fp8_meta.get(operand.direction)
        if state is not None and getattr(state, "scale", None) is not None:
            if operand.name == f"{PROJ}/input":
                state.scale[operand.slot] *= 4
            if operand.name == f"{PROJ}/grad_output":
                state.scale[operand.slot] *= 2.0**-27
            scales[operand.name] = float(state.scale[operand.slot])
    tensors: dict[str, list[np.ndarray]] = {}

    def catch(name: str, tensor: torch.Tensor) -> None:
        tensors.setdefault(name, []).append(tensor.detach().float().reshape(-1, tensor.shape[-1]).cpu().numpy().copy())

    def hook(name: str) -> Callable[..., None]:
        def caught(module: Any, inputs: tuple, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if name == QKV:
                norm = torch.nn.functional.rms_norm(
                    inputs[0].float(), (inputs[0].shape[-1],), module.layer_norm_weight.float(), module.eps
                )
                catch(f"{name}/input", norm.to(inputs[0].dtype))
            else:
                catch(f"{name}/input", inputs[0])
            output.register_hook(lambda gradient: catch(f"{name}/grad_output", gradient))

        return caught

    for name, module in modules.items():
        with torch.no_grad():
            module.weight[0, 0] = 60.0
        catch(f"{name}/weight", module.weight)
        module.register_forward_hook(hook(name))
    fp8 = build_policy(config.precision.model_copy(update={"mode": "fp8"}), config.model.num_layers).fp8
    assert fp8 is not None
    make = (lambda kind: fresh_quantizer(fp8, kind, parts.device.torch_device)) if shadow else None
    in_bf16 = [layer for layer in parts.precision.layers if not parts.precision.runs_in_fp8(layer)]
    probe = TensorProbe(parts.precision.layers, make, in_bf16)
    with probe.measuring():
        _step(parts)
    return Caught(tensors, scales, probe.read())


def _expected(arrays: list[np.ndarray], name: str, recipe: str, scale: float | None) -> tuple[float, float, float]:
    """Shares clipped and flushed, and relative error, of the arrays together."""
    import ml_dtypes

    backward = name.endswith("grad_output") and recipe in ("delayed", "tensorwise")
    dtype, limit = (ml_dtypes.float8_e5m2, 57344.0) if backward else (ml_dtypes.float8_e4m3fn, 448.0)
    clipped = flushed = nonzero = elements = 0
    squared_error = squared_norm = 0.0
    for x in arrays:
        factor = np.float32(scale) if scale is not None else _scales(x, name, recipe, limit)
        scaled = x * factor
        back = np.clip(scaled, -limit, limit).astype(dtype).astype(np.float64) / factor
        clipped += int((np.abs(scaled) > limit * (1 + 1e-5)).sum())
        nonzero += int((x != 0).sum())
        flushed += int(((x != 0) & (back == 0)).sum())
        elements += x.size
        squared_error += float(((x - back) ** 2).sum())
        squared_norm += float((x.astype(np.float64) ** 2).sum())
    return clipped / elements, flushed / nonzero, (squared_error / squared_norm) ** 0.5


def _scales(x: np.ndarray, name: str, recipe: str, limit: float) -> np.ndarray:
    """Factors in FP32 for every element."""
    if recipe in ("delayed", "tensorwise"):
        return np.full_like(x, np.float32(limit) / np.abs(x).max())
    rows, columns = {"mxfp8": (1, 32), "blockwise": (128, 128) if name.endswith("weight") else (1, 128)}[recipe]
    tiles = np.abs(x).reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns).max(axis=(1, 3))
    with np.errstate(divide="ignore"):
        powers = np.floor(np.log2(limit / tiles.astype(np.float64)))
    factors = np.where(tiles == 0, 1.0, np.exp2(np.where(tiles == 0, 0, powers))).astype(np.float32)
    return factors.repeat(rows, axis=0).repeat(columns, axis=1)


def _compare(caught: Caught, recipe: str) -> dict[str, tuple[float, float, float]]:
    expected = {}
    for name in (f"{module}/{kind}" for module in (PROJ, QKV) for kind in ("input", "weight", "grad_output")):
        found = caught.measured[name]
        expected[name] = _expected(caught.tensors[name], name, recipe, caught.scales.get(name))
        # The norm is computed again here, in another order, so single elements may round to a neighbour.
        exact = name != f"{QKV}/input"
        shares = (found.clipped, found.flushed)
        assert shares == pytest.approx(expected[name][:2], rel=1e-12 if exact else 0.2, abs=0 if exact else 1e-3), name
        assert found.error == pytest.approx(expected[name][2], rel=1e-5 if exact else 2e-2), name
    return expected


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_against_casts_by_another_library(recipe: str) -> None:
    (caught,) = run_on_ranks(1, _measure, config(recipe, fp8_amax_history_len=4), False)
    assert len(caught.tensors[f"{PROJ}/input"]) == 2
    assert len(caught.measured) == 24
    expected = _compare(caught, recipe)
    if recipe == "delayed":
        # The spoilt scales did something.
        assert expected[f"{PROJ}/input"][0] > 1e-3
        assert expected[f"{PROJ}/grad_output"][1] > 1e-2
    if recipe == "tensorwise":
        # What is small beside the weight's outlier is lost.
        assert expected[f"{PROJ}/weight"][1] > 5e-3


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_bf16_layers_are_measured_as_fp8_would_do(recipe: str) -> None:
    (caught,) = run_on_ranks(1, _measure, config(recipe, mode="bf16"), True)
    assert len(caught.measured) == 24
    _compare(caught, recipe)


def test_overridden_gemms() -> None:
    overridden = config("tensorwise", override_linear_precision=[False, False, True])
    (caught,) = run_on_ranks(1, _measure, overridden, False)
    assert len(caught.measured) == 24
    _compare(caught, "tensorwise")


def _trace(config: Config, probed: bool) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Losses, FP8 state and parameters of three steps, as plain data; what the probe read in the last."""
    import torch

    parts = _parts(config)
    from megatron_fp8.precision.probe import TensorProbe
    from megatron_fp8.precision.te_recipe import fresh_quantizer

    fp8 = parts.precision.policy.fp8
    losses, measured = [], {}
    for _ in range(3):
        probe = TensorProbe(
            parts.precision.layers,
            lambda kind: fresh_quantizer(fp8, kind, parts.device.torch_device),
            config.precision.bf16_layers,
        )
        if probed:
            with probe.measuring():
                result = _step(parts)
            measured = probe.read()
        else:
            result = _step(parts)
        losses += [result.loss.reduced_mean(), result.grad_norm]
    state = {name: tensor.tolist() for name, tensor in parts.precision.state_dict().items()}
    for name, parameter in parts.chunks[0].module.named_parameters():
        state[f"gradient {name}"] = parameter.main_grad.view(torch.int32).flatten().tolist()
        state[name] = parameter.detach().view(torch.int16).flatten().tolist()
    return losses, state, measured


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_nothing_is_disturbed(recipe: str) -> None:
    # A layer in BF16, so that the shadow measurement runs too.
    watched = config(recipe, bf16_layers=[0])
    (plain,), (probed,) = (run_on_ranks(1, _trace, watched, on) for on in (False, True))
    assert len(probed[2]) == 24
    assert probed[:2] == plain[:2]


@pytest.mark.parametrize("override", [[True, False, False], [False, True, False]])
def test_overridden_gemms_of_fp8_layers_are_not_taken_for_bf16_layers(override: list[bool]) -> None:
    watched = config("delayed", override_linear_precision=override)
    (alone,) = run_on_ranks(1, _sums, watched)
    (beside_bf16,) = run_on_ranks(1, _sums, watched, True)
    assert {name: beside_bf16[name] for name in alone if name.startswith("layers.1/")} == {
        name: sums for name, sums in alone.items() if name.startswith("layers.1/")
    }
    assert any(name.startswith("layers.0/") for name in beside_bf16)


def test_recomputed_tensors_are_counted_once() -> None:
    plain, recomputed = (
        run_on_ranks(1, _sums, config("delayed", recompute=recompute))[0] for recompute in ("none", "full")
    )
    assert len(plain) == 24
    assert recomputed == plain


def _sums(config: Config, shadow: bool = False) -> dict[str, list[float]]:
    """The sums of one step; `shadow`: as when layer 0, here in FP8 too, had fallen back."""
    parts = _parts(config)
    from megatron_fp8.precision.probe import TensorProbe
    from megatron_fp8.precision.te_recipe import fresh_quantizer

    fp8 = parts.precision.policy.fp8
    make = (lambda kind: fresh_quantizer(fp8, kind, parts.device.torch_device)) if shadow else None
    probe = TensorProbe(parts.precision.layers, make, bf16_layers=[0] if shadow else [])
    with probe.measuring():
        _step(parts)
    return {name: sums.tolist() for name, sums in probe._sums.items()}


def _functions(config: Config) -> tuple[bool, bool]:
    """Whether the extension is as before after a step that failed, and was another inside."""
    parts = _parts(config)
    import transformer_engine_torch as tex
    from transformer_engine.pytorch import cpp_extensions

    from megatron_fp8.precision.probe import TensorProbe

    def functions() -> dict[str, Any]:
        return {
            f"{module.__name__}.{name}": value
            for module in (tex, cpp_extensions)
            for name, value in vars(module).items()
            if callable(value)
        }

    before = functions()
    inside: dict[str, Any] = {}
    try:
        with TensorProbe(parts.precision.layers).measuring():
            inside = functions()
            raise KeyError
    except KeyError:
        pass
    after = functions()
    return before == after, before == inside


def test_the_extension_is_restored_after_an_exception() -> None:
    assert run_on_ranks(1, _functions, config("delayed")) == [(True, False)]
