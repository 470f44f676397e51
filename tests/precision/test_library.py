"""`megatron_fp8.precision` around modules of one's own: names, evaluation, and what an import says without CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te

from megatron_fp8.precision import PrecisionConfig, PrecisionManager, build_policy
from megatron_fp8.precision.operands import Operand, operands
from megatron_fp8.precision.probe import TensorProbe

ROOT = Path(__file__).resolve().parents[2]


def manager_of(layer: torch.nn.Module, **precision: object) -> PrecisionManager:
    """A manager of one layer in FP8, alone in its job."""
    config = PrecisionConfig(mode="fp8", fp8_amax_history_len=4, **precision)
    manager = PrecisionManager(build_policy(config, num_layers=1), None, torch.device("cuda"))
    manager.attach({0: layer})
    return manager


def step(manager: PrecisionManager, layer: torch.nn.Module, value: float = 1.0) -> None:
    x = torch.full((16, 16), value, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with manager.training_step():
        with manager.region(0):
            y = layer(x)
        y.float().sum().backward()
    manager.finish_step()


def linear() -> te.Linear:
    return te.Linear(16, 16, params_dtype=torch.bfloat16, device="cuda")


def test_a_bare_module_is_named_by_its_number_alone() -> None:
    manager = manager_of(linear())
    assert [state.name for state in manager.scaling_states()] == ["layers.0.scaling_fwd", "layers.0.scaling_bwd"]
    assert sorted(name for name in manager.state_dict() if name.startswith("layers")) == [
        *("layers.0.scaling_bwd.amax_history", "layers.0.scaling_bwd.scale"),
        *("layers.0.scaling_fwd.amax_history", "layers.0.scaling_fwd.scale"),
    ]
    names = [operand.name for operand in operands(manager.layers)]
    assert names == ["layers.0/input", "layers.0/weight", "layers.0/grad_output"]


def test_a_bare_mlp_names_its_two_linear_layers() -> None:
    mlp = te.LayerNormMLP(16, 32, params_dtype=torch.bfloat16, device="cuda")
    names = [operand.name for operand in operands({3: mlp})]
    assert names == [f"layers.3/{fc}/{kind}" for fc in ("fc1", "fc2") for kind in ("input", "weight", "grad_output")]


def test_state_is_loaded_by_another_manager() -> None:
    first, second = linear(), linear()
    manager, other = manager_of(first), manager_of(second)
    step(manager, first, 8.0)
    assert other.load_state_dict(manager.state_dict()) == []
    for name, tensor in manager.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


@pytest.mark.parametrize("fp8_eval", [True, False])
def test_evaluation_leaves_no_trace_even_after_an_exception(fp8_eval: bool) -> None:
    layer = linear()
    manager = manager_of(layer, fp8_eval=fp8_eval)
    step(manager, layer)
    before = manager.state_dict()
    x = torch.full((16, 16), 304.0, dtype=torch.bfloat16, device="cuda")

    def fails() -> None:
        with manager.evaluation(), manager.region(0):
            layer(x)
            amax = next(iter(manager.scaling_states())).amax_history[0, 0]
            assert float(amax) == (304.0 if fp8_eval else 0.0)
            raise KeyError("inside")

    with pytest.raises(KeyError):
        fails()
    assert torch.is_grad_enabled()
    for name, tensor in manager.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    # FP8 again: the running amax is collected.
    with manager.training_step(), manager.region(0):
        layer(x)
    assert float(next(iter(manager.scaling_states())).amax_history[0, 0]) == 304.0


def test_a_probe_measures_on_after_a_quantizer_that_failed() -> None:
    layer = linear()

    class Failing:
        """Stands for a quantizer that does not take a tensor."""

        def set_usage(self, **_: bool) -> None: ...

        def quantize(self, _: torch.Tensor) -> None:
            raise KeyError("inside")

    manager = PrecisionManager(
        build_policy(PrecisionConfig(mode="fp8", first_last_layers_bf16=True, fp8_amax_history_len=4), 3),
        None,
        torch.device("cuda"),
    )
    manager.attach({0: layer, 1: (other := linear())})
    probe = TensorProbe(manager.layers, lambda _: Failing(), (0,))  # type: ignore[arg-type,return-value]
    x = torch.ones((16, 16), dtype=torch.bfloat16, device="cuda")
    with probe.measuring(), manager.training_step():
        with pytest.raises(KeyError), manager.region(0):
            layer(x)
        with manager.region(1):
            other(x)
    assert "layers.1/input" in probe.read()
    assert isinstance(next(iter(operands(manager.layers))), Operand)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="with CUDA there is nothing to install")
def test_without_the_stand_in_an_import_says_what_to_write() -> None:
    line = "from megatron_fp8.precision import PrecisionManager"
    # What installing it in this process has set.
    environment = {name: value for name, value in os.environ.items() if name != "NVTE_PROJECT_BUILDING"}
    command = [sys.executable, "-c", line]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    error = done.stderr[done.stderr.rindex("RuntimeError: ") :]
    assert error.startswith("RuntimeError: Transformer Engine finds no CUDA on this machine")
    assert "    from megatron_fp8 import cpu\n\n    cpu.install()\n" in error
    # What it says to write is what works.
    program = f"from megatron_fp8 import cpu\n\ncpu.install()\n{line}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_the_policy_is_read_without_torch() -> None:
    program = "import sys, megatron_fp8.precision.policy as p\np.build_policy; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    from megatron_fp8 import precision

    with pytest.raises(AttributeError, match="no attribute 'Manager'"):
        precision.Manager  # noqa: B018
    assert set(precision.__all__) == {"PrecisionConfig", "PrecisionManager", "PrecisionPolicy", "build_policy"}
