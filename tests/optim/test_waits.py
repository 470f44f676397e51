"""How often the host waits for the device in a step: once, for the norm of the gradients and the loss together."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import pytest

from tests.ranks import run_on_ranks
from tests.small_run import batches, run_small, small_config

# Where Megatron Core 0.16 reads the norm and the number of tokens.
OF_0_16 = ("finalize_model_grads.py",)
READS = ("item", "tolist", "__float__", "__bool__", "__int__", "__index__", "cpu", "numpy")


def reads_of_a_step(parts: Any) -> list[str]:
    """Places at which a step of the loop reads a tensor's values, the first steps being over."""
    import torch

    from megatron_fp8.train.checkpointing import Progress
    from megatron_fp8.train.loop import _step
    from megatron_fp8.train.state import Pace, TrainState
    from megatron_fp8.train.step import IntervalLoss

    progress = Progress(TrainState(iteration=2), IntervalLoss(parts.device.torch_device), None)
    iterators = batches(parts)

    seen: list[str] = []
    before = {name: getattr(torch.Tensor, name) for name in READS}

    def counted(name: str) -> Any:
        def read(tensor: Any, *arguments: Any, **named: Any) -> Any:
            caller = sys._getframe(1)
            # The stand-in's kernels compute on the host.
            if "megatron_fp8/cpu/" not in caller.f_code.co_filename:
                seen.append(f"{caller.f_code.co_filename.rpartition('/')[2]}: {caller.f_code.co_name}: {name}")
            return before[name](tensor, *arguments, **named)

        return read

    for name in READS:
        setattr(torch.Tensor, name, counted(name))
    try:
        _step(parts, iterators, progress, Pace(10))
    finally:
        for name, function in before.items():
            setattr(torch.Tensor, name, function)
    return seen


PRECISIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"mode": "bf16"}, []),
    ({"mode": "fp8"}, []),
    ({"mode": "fp8", "fp8_param_gather": True}, []),
    # Whether FP16's gradients overflowed is read before their norm is taken.
    ({"mode": "fp16", "initial_loss_scale": 256.0}, ["optimizer.py: _unscale_main_grads_and_check_for_nan: item"]),
]


@pytest.mark.parametrize(("precision", "of_megatron"), PRECISIONS)
def test_a_step_waits_once(precision: dict[str, Any], of_megatron: list[str]) -> None:
    config = small_config(
        model={"num_layers": 2},
        precision=precision,
        training={"global_batch_size": 4},
        logging={"log_interval": 100},
        faults={"replica_check_interval": 0},
    )
    for record in run_on_ranks(2, run_small, config, 2, reads_of_a_step):
        own = [place for place in record.probe if place.startswith("optimizer.py: allowed_norm")]
        others = [place for place in record.probe if place not in own]
        assert own == ["optimizer.py: allowed_norm: tolist"]
        if version("megatron-core") >= "0.19":
            assert others == of_megatron
        else:
            # Megatron reads more before; nobody else does.
            assert {place.partition(":")[0] for place in others} <= {"optimizer.py", "clip_grads.py", *OF_0_16}
