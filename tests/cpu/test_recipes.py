"""Which recipes Transformer Engine finds on the stand-in: a Hopper GPU's, and MXFP8."""

from __future__ import annotations

from megatron_fp8.cpu import install

install()

import torch  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.common.recipe import DelayedScaling, MXFP8BlockScaling  # noqa: E402
from transformer_engine.pytorch.quantization import get_default_recipe  # noqa: E402
from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported  # noqa: E402


def test_mxfp8_runs_and_all_else_is_hopper() -> None:
    assert te.is_mxfp8_available(return_reason=True) == (True, "")
    assert torch.cuda.get_device_capability() == (9, 0)
    assert not is_non_tn_fp8_gemm_supported()
    assert not te.is_nvfp4_available()
    linear = te.Linear(32, 32, params_dtype=torch.bfloat16)
    x = torch.randn(32, 32).bfloat16()
    with te.autocast(enabled=True, recipe=MXFP8BlockScaling()):
        assert not torch.equal(linear(x), torch.nn.functional.linear(x, linear.weight, linear.bias))


def test_a_program_that_names_no_recipe_gets_hoppers() -> None:
    assert isinstance(get_default_recipe(), DelayedScaling)
    linear = te.Linear(32, 32, params_dtype=torch.bfloat16)
    with te.autocast(enabled=True):
        linear(torch.randn(32, 32).bfloat16())
    assert isinstance(linear.fp8_meta["recipe"], DelayedScaling)
