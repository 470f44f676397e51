"""How often the host waits for the device in a step: once, for the norm of the gradients and the loss together."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.ranks import run_on_ranks
from tests.small_run import batches, run_small, small_config

READS = ("item", "tolist", "__float__", "__bool__", "__int__", "__index__", "cpu", "numpy")


def reads_of_a_step(parts: Any) -> list[str]:
    """Places at which a step reads a tensor's values, the first steps being over."""
    import torch

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
        parts.stepper.train(parts.optimizer, batches(parts), parts.batch_shape)
    finally:
        for name, function in before.items():
            setattr(torch.Tensor, name, function)
    return seen


@pytest.mark.parametrize("precision", [{"mode": "bf16"}, {"mode": "fp8"}, {"mode": "fp8", "fp8_param_gather": True}])
def test_a_step_waits_once(precision: dict[str, Any]) -> None:
    config = small_config(model={"num_layers": 2}, precision=precision, training={"global_batch_size": 4})
    for record in run_on_ranks(2, run_small, config, 2, reads_of_a_step):
        assert [place for place in record.probe if place.startswith("update.py")] == ["update.py: allowed_norm: tolist"]
        others = [place for place in record.probe if not place.startswith("update.py")]
        assert others == [], others
