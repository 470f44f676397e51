"""Communication that overlaps computation changes nothing: same losses, same norms, bit for bit."""

from __future__ import annotations

import pytest

from tests.ranks import run_on_ranks
from tests.small_run import run_small, small_config

# (tp, pp, vpp, world size)
LAYOUTS = [(1, 1, None, 2), (2, 1, None, 4), (1, 2, None, 4), (1, 2, 2, 4)]


def losses(tp: int, pp: int, vpp: int | None, overlap: bool, tied: bool) -> list:
    config = small_config(
        model={"untie_embeddings_and_output_weights": not tied},
        precision={"mode": "bf16"},
        parallel={
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": overlap,
            "overlap_param_gather": overlap,
        },
    )
    return run_small(config, 3).steps


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp", "vpp", "world_size"), LAYOUTS)
def test_overlap_changes_nothing(tp, pp, vpp, world_size, tied) -> None:
    plain = run_on_ranks(world_size, losses, tp, pp, vpp, False, tied)
    assert run_on_ranks(world_size, losses, tp, pp, vpp, True, tied) == plain
