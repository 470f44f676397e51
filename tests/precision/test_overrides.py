"""GEMMs and layers that stay in BF16: per GEMM, per layer, by global number under any pipeline split."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.small_run import run_small, small_config

RECIPES = ["delayed", "tensorwise", "blockwise"]
GEMMS = ["fprop", "dgrad", "wgrad"]


def config_of(parallel: dict | None = None, mode: str = "fp8", **precision):
    return small_config(
        model={"seq_length": 64},
        precision={"mode": mode, "fp8_amax_history_len": 4, **precision},
        parallel=parallel or {},
        training={"global_batch_size": 4},
    )


def is_high_precision(operand, rows: bool) -> bool:
    """Whether the direction of a GEMM's operand that the GEMM reads is not FP8."""
    from transformer_engine.pytorch.tensor.storage.hybrid_tensor_storage import HybridQuantizedTensorStorage
    from transformer_engine.pytorch.tensor.storage.identity_tensor_storage import IdentityTensorStorage

    if isinstance(operand, HybridQuantizedTensorStorage):
        operand = operand._rowwise_storage if rows else operand._columnwise_storage
    plain = isinstance(operand, torch.Tensor) and type(operand) in (torch.Tensor, torch.nn.Parameter)
    return plain or isinstance(operand, IdentityTensorStorage)


def gemms_of_a_step(config) -> dict[str, set[bool]]:
    """For each kind of GEMM, whether its operands were high precision, over all layers' GEMMs of one step."""
    import transformer_engine_torch as tex

    seen: dict[str, set[bool]] = {gemm: set() for gemm in GEMMS}
    # TE's layouts: fprop TN, dgrad NN, wgrad NT (A transposed, B transposed).
    names = {(True, False): "fprop", (False, False): "dgrad", (False, True): "wgrad"}
    real = tex.generic_gemm

    def spy(a, transa, b, transb, *args, **kwargs):
        # The head is BF16 always; its vocabulary tells it apart.
        if 256 not in (*a.shape, *b.shape):
            seen[names[transa, transb]].add(is_high_precision(a, transa) and is_high_precision(b, not transb))
        return real(a, transa, b, transb, *args, **kwargs)

    tex.generic_gemm = spy
    try:
        run_small(config, 1)
    finally:
        tex.generic_gemm = real
    return seen


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("overridden", GEMMS)
def test_the_overridden_gemm_and_no_other_runs_in_high_precision(recipe: str, overridden: str) -> None:
    config = config_of(fp8_recipe=recipe, override_linear_precision=[gemm == overridden for gemm in GEMMS])
    (seen,) = run_on_ranks(1, gemms_of_a_step, config)
    assert seen == {gemm: {gemm == overridden} for gemm in GEMMS}


def losses(config, num_steps: int = 3) -> list[tuple[float, float]]:
    return [(step.loss, step.grad_norm) for step in run_small(config, num_steps).steps]


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_gemms_overridden_is_bf16_bit_for_bit(recipe: str) -> None:
    (overridden,) = run_on_ranks(1, losses, config_of(fp8_recipe=recipe, override_linear_precision=[True] * 3))
    (bf16,) = run_on_ranks(1, losses, config_of(mode="bf16"))
    assert overridden == bf16


def test_an_override_changes_the_run_and_stays_close() -> None:
    (plain,) = run_on_ranks(1, losses, config_of())
    (overridden,) = run_on_ranks(1, losses, config_of(override_linear_precision=[False, False, True]))
    # Forward passes differ a little too: TE rounds a norm's output to BF16 before a quantizer of two directions.
    assert overridden != plain
    assert overridden == [pytest.approx(step, rel=5e-2) for step in plain]


@pytest.mark.parametrize("recipe", RECIPES)
def test_overrides_over_tensor_parallel_ranks_agree_with_one_rank(recipe: str) -> None:
    precision = {"fp8_recipe": recipe, "override_linear_precision": [False, True, True]}
    (alone,) = run_on_ranks(1, losses, config_of(**precision))
    wide = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    for shared in run_on_ranks(2, losses, config_of(wide, **precision)):
        assert shared == [pytest.approx(step, rel=2e-2) for step in alone]


@pytest.mark.parametrize("override", [[False, False, True], [False, True, False], [False, True, True]])
def test_overrides_survive_recompute_bit_for_bit(override: list[bool]) -> None:
    """fprop's override does not with delayed scaling, and is refused by the config."""
    config = config_of(override_linear_precision=override)
    recomputing = config.model_copy(update={"model": config.model.model_copy(update={"recompute_granularity": "full"})})
    (plain,) = run_on_ranks(1, losses, config)
    (recomputed,) = run_on_ranks(1, losses, recomputing)
    assert recomputed == plain


def fp8_layers(config) -> set[int]:
    """Layers of this rank, by global number, whose weights were quantized in a step."""

    def probe(parts) -> set[int]:
        return {
            number
            for number, layer in parts.precision._layers.items()
            if layer.layernorm_mlp._fp8_workspaces or layer.self_attention.proj._fp8_workspaces
        }

    return run_small(config, 1, probe).probe


LAYOUTS = [(1, {}), (2, {"pipeline_model_parallel_size": 2})]
LAYOUTS += [(2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2})]
LAYOUTS += [(4, {"pipeline_model_parallel_size": 4}), (4, {"pipeline_model_parallel_size": 2})]


@pytest.mark.parametrize(("world_size", "parallel"), LAYOUTS)
def test_layers_stay_in_bf16_by_global_number(world_size: int, parallel: dict) -> None:
    first_and_last = config_of(parallel, first_last_layers_bf16=True)
    assert set.union(*run_on_ranks(world_size, fp8_layers, first_and_last)) == {1, 2}
    listed = config_of(
        parallel,
        first_last_layers_bf16=True,
        num_layers_at_start_in_bf16=0,
        num_layers_at_end_in_bf16=2,
        bf16_layers=[0],
    )
    assert set.union(*run_on_ranks(world_size, fp8_layers, listed)) == {1}


@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_in_bf16_train_alike_under_any_pipeline_split(recipe: str) -> None:
    """The second of two stages has no FP8 layer at all."""
    precision = {"fp8_recipe": recipe, "bf16_layers": [2, 3]}
    (alone,) = run_on_ranks(1, losses, config_of(**precision))
    piped = run_on_ranks(2, losses, config_of({"pipeline_model_parallel_size": 2}, **precision))
    assert piped[0] == piped[1]
    assert piped[0] == [pytest.approx(step, rel=1e-3) for step in alone]


def test_all_layers_in_bf16_is_the_bf16_run_bit_for_bit() -> None:
    (bf16,) = run_on_ranks(1, losses, config_of(mode="bf16"))
    (listed,) = run_on_ranks(1, losses, config_of(bf16_layers=[0, 1, 2, 3]))
    assert listed == bf16
