"""`torch.cuda` and device "cuda" on a machine without CUDA, as `install()` gives them to training."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fp8.cpu import install

install()

CUDA_FORMS = ["cuda", "cuda:0", "cuda:3", 0, torch.device("cuda"), torch.device("cuda", 1)]
FACTORIES: dict[str, Callable[..., torch.Tensor]] = {
    "arange": lambda **kw: torch.arange(1, 7, 2, **kw),
    "as_tensor": lambda **kw: torch.as_tensor([1, 2], **kw),
    "asarray": lambda **kw: torch.asarray([1, 2], **kw),
    "empty": lambda **kw: torch.empty(2, 3, **kw).zero_(),
    "empty_like": lambda **kw: torch.empty_like(torch.ones(2), **kw).zero_(),
    "empty_strided": lambda **kw: torch.empty_strided((2, 3), (1, 2), **kw).zero_(),
    "eye": lambda **kw: torch.eye(3, **kw),
    "full": lambda **kw: torch.full((2,), 7.0, **kw),
    "full_like": lambda **kw: torch.full_like(torch.ones(2), 3, **kw),
    "linspace": lambda **kw: torch.linspace(0, 1, 5, **kw),
    "new_full": lambda **kw: torch.ones(1).new_full((2,), 3, **kw),
    "new_tensor": lambda **kw: torch.ones(1).new_tensor([3], **kw),
    "new_zeros": lambda **kw: torch.ones(1).new_zeros(2, **kw),
    "ones": lambda **kw: torch.ones((2, 3), **kw),
    "rand": lambda **kw: torch.rand(4, **kw),
    "rand_like": lambda **kw: torch.rand_like(torch.ones(4), **kw),
    "randint": lambda **kw: torch.randint(0, 9, (4,), **kw),
    "randn": lambda **kw: torch.randn(4, **kw),
    "randperm": lambda **kw: torch.randperm(9, **kw),
    "scalar_tensor": lambda **kw: torch.scalar_tensor(3.0, **kw),
    "tensor": lambda **kw: torch.tensor([1.0], **kw),
    "tril_indices": lambda **kw: torch.tril_indices(3, 3, **kw),
    "zeros": lambda **kw: torch.zeros(2, **kw),
    "zeros_like": lambda **kw: torch.zeros_like(torch.ones(2), **kw),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factory_on_cuda_equals_factory_on_cpu(name: str) -> None:
    make = FACTORIES[name]
    for device in CUDA_FORMS:
        torch.manual_seed(11)
        expected = make(device="cpu")
        torch.cuda.manual_seed(11)
        made = make(device=device)
        assert made.is_cuda
        assert made.device.type == "cuda"
        assert made.dtype == expected.dtype
        assert made.stride() == expected.stride()
        assert torch.equal(made.cpu(), expected)
    assert make().device.type == "cpu"
    assert make(device=None).device.type == "cpu"
    assert make(device="meta").device.type == "meta"


def test_factories_keep_their_other_arguments() -> None:
    tensor = torch.empty(3, dtype=torch.bfloat16, device="cuda", requires_grad=True, pin_memory=False)
    assert tensor.dtype == torch.bfloat16
    assert tensor.requires_grad
    assert torch.empty(3, pin_memory=True).is_pinned()
    with pytest.raises(RuntimeError):
        torch.zeros(2, device="nonsense")
    with pytest.raises(TypeError):
        torch.zeros(2, unknown=1, device="cuda")
    for device in ("cpu", "cuda"):
        out = torch.empty(2, device=device)
        assert torch.zeros(2, out=out) is out
        assert out.device.type == device


def test_host_memory_is_not_shared_with_the_device() -> None:
    array = np.ones(3, dtype=np.float32)
    for tensor in (torch.as_tensor(array, device="cuda"), torch.asarray(array, device="cuda")):
        tensor.add_(1)
    assert (array == 1).all()
    assert torch.as_tensor(array).data_ptr() == array.ctypes.data


@pytest.mark.parametrize("device", CUDA_FORMS)
def test_moves_to_cuda_are_copies(device: Any) -> None:
    tensor = torch.ones(3, requires_grad=True)
    other = torch.zeros(1, dtype=torch.float16, device="cuda")
    for moved in (
        *(tensor.cuda(), tensor.cuda(device), tensor.cuda(device=device, non_blocking=True)),
        *(tensor.to(device), tensor.to(device, non_blocking=True), tensor.to(device=device), tensor.to(other)),
        *(
            tensor.to(device, torch.float64),
            tensor.to(dtype=torch.float16, device=device),
            tensor.to(device, None, True),
        ),
    ):
        assert moved.is_cuda
        assert moved.requires_grad
        assert moved.data_ptr() != tensor.data_ptr()
        assert moved.to(device) is moved
        assert moved.to(device, copy=True) is not moved
    assert not tensor.is_cuda
    assert tensor.to(device, torch.float64).dtype == torch.float64
    assert tensor.to(dtype=torch.float16, device=device).dtype == torch.float16
    assert tensor.to(other).dtype == torch.float16
    tensor.to(device).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.device.type == "cpu"


def test_moves_to_the_host_are_copies() -> None:
    tensor = torch.ones(3, requires_grad=True, device="cuda")
    for moved in (tensor.cpu(), tensor.to("cpu"), tensor.to(device="cpu"), tensor.to(torch.zeros(1))):
        assert moved.device.type == "cpu"
        assert moved.data_ptr() != tensor.data_ptr()
        assert moved.requires_grad
        assert moved.cpu() is moved
    assert tensor.is_cuda
    assert torch.ones(3, device="meta").is_cuda is False
    with pytest.raises(NotImplementedError):
        torch.ones(3, device="meta").cuda()


def test_answers_of_a_tensor() -> None:
    for dtype, name in [(torch.float32, "Float"), (torch.bfloat16, "BFloat16"), (torch.float16, "Half")]:
        parameter = torch.nn.Parameter(torch.ones(2, dtype=dtype, device="cuda"))
        assert parameter.type() == f"torch.cuda.{name}Tensor"
        assert parameter.type("torch.cuda.DoubleTensor").dtype == torch.float64
        assert parameter.type(torch.float16).dtype == torch.float16
        assert isinstance(parameter, getattr(torch.cuda, f"{name}Tensor"))
        assert parameter.is_cuda
        assert parameter.get_device() == torch.cuda.current_device()
        assert parameter.record_stream(torch.cuda.current_stream()) is None


def test_default_device_generator_and_load() -> None:
    with torch.device("cuda"):
        assert torch.zeros(1).is_cuda
        with torch.device("cpu"):
            assert not torch.zeros(1).is_cuda
        assert torch.zeros(1).is_cuda
    torch.set_default_device("cuda")
    try:
        assert torch.randn(2).is_cuda
        assert torch.get_default_device().type == "cuda"
    finally:
        torch.set_default_device(None)
    assert not torch.randn(2).is_cuda
    generator = torch.Generator(device="cuda")
    assert isinstance(generator, torch.Generator)
    assert not isinstance(3, torch.Generator)


def test_files_say_where_tensors_were() -> None:
    file = io.BytesIO()
    both = {"gpu": torch.ones(2, device="cuda"), "host": torch.nn.Parameter(torch.zeros(2))}
    torch.save(both, file)
    for location in ("cuda", "cuda:1", torch.device("cuda"), {"cpu": "cuda:0"}):
        file.seek(0)
        assert all(tensor.is_cuda for tensor in torch.load(file, map_location=location).values())
    for location in ("cpu", torch.device("cpu"), {"cuda:0": "cpu"}):
        file.seek(0)
        assert not any(tensor.is_cuda for tensor in torch.load(file, map_location=location).values())
    file.seek(0)
    loaded = torch.load(file)
    for copied in (loaded, pickle.loads(pickle.dumps(both)), copy.deepcopy(both)):
        assert copied["gpu"].is_cuda
        assert not copied["host"].is_cuda
        assert isinstance(copied["host"], torch.nn.Parameter)
        assert torch.equal(copied["gpu"], both["gpu"])
        assert torch.equal(copied["host"], both["host"])
    assert b"megatron_fp8" not in file.getvalue()


def test_torchscript_still_knows_the_factories() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2, dtype=torch.float32) + torch.ones_like(x) * x.to(torch.float32)

    assert torch.jit.script(function)(torch.ones(2, device="cuda")).tolist() == [1, 1]


def test_cuda_states_govern_what_is_drawn() -> None:
    draws: list[Callable[[], torch.Tensor]] = [
        lambda: torch.nn.functional.dropout(torch.ones(64, device="cuda"), 0.5),
        lambda: torch.randn(8, device="cuda"),
        lambda: torch.ones(8, device="cuda").bernoulli_(0.5),
    ]
    for draw in draws:
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first, second = draw(), draw()
        assert not torch.equal(first, second)
        torch.cuda.set_rng_state(state)
        assert torch.equal(draw(), first)
        torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
        assert torch.equal(draw(), second)
        torch.cuda.default_generators[0].set_state(state)
        with torch.random.fork_rng(devices=[0], device_type="cuda"):
            torch.cuda.manual_seed_all(99)
            draw()
        assert torch.equal(draw(), first)
    torch.cuda.manual_seed(17)
    assert torch.cuda.initial_seed() == 17


def test_state_is_a_snapshot() -> None:
    state = torch.cuda.get_rng_state()
    kept = state.clone()
    torch.rand(1000, device="cuda")
    assert torch.equal(state, kept)
    assert not torch.equal(torch.cuda.get_rng_state(), kept)


def test_streams_nest_for_each_thread() -> None:
    outer, inner = torch.cuda.Stream(), torch.cuda.Stream(device="cuda", priority=-1)
    seen = []
    with torch.cuda.stream(outer):
        with torch.cuda.stream(inner), torch.cuda.stream(None):
            assert torch.cuda.current_stream() == inner
            inner.wait_stream(outer)
            inner.wait_event(outer.record_event())
            thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
            thread.start()
            thread.join()
        assert torch.cuda.current_stream() == outer
    assert seen == [torch.cuda.default_stream()]
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != outer
    with pytest.raises(KeyError), torch.cuda.stream(outer):
        raise KeyError
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with outer:
        assert torch.cuda.current_stream() == outer
    assert len({outer, inner, torch.cuda.default_stream(), torch.cuda.current_stream()}) == 3


def test_events_measure() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    torch.randn(300, 300) @ torch.randn(300, 300)
    end.record()
    end.synchronize()
    assert 0 < start.elapsed_time(end) < 60_000
    assert end.elapsed_time(start) == -start.elapsed_time(end)
    with pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(end)


def test_device_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties(torch.cuda.current_device()).major == 9
    assert "CPU" in torch.cuda.get_device_name()
    assert torch.cuda.get_arch_list() == ["sm_90"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torch.cuda.device_count() == 4
    with torch.cuda.device(3):
        assert torch.cuda.current_device() == 3
        assert torch.cuda.current_stream().device == torch.device("cuda:3")
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device("cuda:2")
    assert torch.ones(1, device="cuda").get_device() == 2
    assert torch.ones(1).get_device() == -1
    torch.cuda.set_device(0)
    with pytest.raises(ValueError, match="4 device"):
        torch.cuda.set_device(4)


def test_nvtx_ranges_are_silent() -> None:
    torch.cuda.nvtx.range_push("step")
    torch.cuda.nvtx.range_pop()
    with torch.cuda.nvtx.range("block"):
        torch.cuda.nvtx.mark("point")


def test_missing_functions_say_their_name() -> None:
    for name in ("utilization", "power_draw", "CUDAGraph", "make_graphed_callables", "graph", "MemPool"):
        with pytest.raises(NotImplementedError, match=rf"torch\.cuda\.{name}"):
            getattr(torch.cuda, name)()


def _refusal(function: Callable[[], object]) -> str | None:
    """What a call without arguments complains of; None when it works or wants arguments."""
    try:
        function()
    except TypeError as error:
        return None if "argument" in str(error) else str(error)
    except (NotImplementedError, RuntimeError, AssertionError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def test_every_public_name_works_or_refuses_by_name() -> None:
    """Nothing of `torch.cuda` ends in torch's own "not compiled with CUDA" or in a missing C function."""
    for name in torch.cuda.__all__:
        member = getattr(torch.cuda, name)
        if callable(member) and not name.endswith(("Tensor", "Storage", "Error")):
            refusal = _refusal(member)
            assert refusal is None or refusal == f"NotImplementedError: torch.cuda.{name} has no CPU stand-in"


def test_autocast_of_cuda_is_one_state_with_the_cpus() -> None:
    a = torch.randn(4, 4, device="cuda", requires_grad=True)
    assert torch.get_autocast_dtype("cuda") == torch.float16
    with torch.autocast("cuda"):
        assert torch.get_autocast_dtype("cuda") == torch.float16
        assert (a @ a).dtype == torch.float16
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_gpu_dtype() == torch.bfloat16
        assert (a @ a).dtype == torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert (a @ a).dtype == torch.float32
    assert not torch.is_autocast_enabled()
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
    assert torch.get_autocast_dtype("cuda") == torch.float16
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_custom_fwd_casts() -> None:
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append((x.dtype, torch.is_autocast_enabled()))
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append((gradient.dtype, torch.is_autocast_enabled()))
            return gradient * 2

    x = torch.ones(2, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        Function.apply(x).sum().backward()
    assert seen == [(torch.float32, False), (torch.float32, False)]


def test_device_and_generator_classes_answer_as_torchs_own() -> None:
    device = torch.device(1)
    assert device == torch.device("cuda", 1) == torch.device("cuda:1")
    assert isinstance(device, torch.device)
    assert not isinstance("cuda", torch.device)
    assert pickle.loads(pickle.dumps(device)) == device
    assert copy.deepcopy(device) == device
    assert {type(device): "found"}[torch.device] == "found"
    assert torch.device(type="cuda", index=2).index == 2
    assert torch.device("cpu").type == "cpu"
    with pytest.raises(RuntimeError):
        torch.device("nonsense")
    assert torch.Generator().device.type == "cpu"
    assert hasattr(torch.Generator, "clone_state")

    @torch.library.custom_op("megatron_fp8_test::made_on", mutates_args=())
    def made_on(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch.zeros_like(x, device=device)

    assert made_on(torch.ones(2), torch.device("cpu")).sum() == 0


@pytest.mark.parametrize("device", CUDA_FORMS)
def test_modules_move_to_every_form_of_device(device: Any) -> None:
    def moved(*args: Any, **kwargs: Any) -> torch.nn.Module:
        module = torch.nn.BatchNorm1d(2)
        weight = module.weight
        assert module.to(*args, **kwargs) is module
        assert module.weight is weight
        return module

    for module in (
        *(moved(device), moved(device=device), moved(device, torch.float64), moved(device=device, dtype=torch.float64)),
        *(moved(torch.zeros(1, device=device)), moved(device, non_blocking=True), torch.nn.BatchNorm1d(2).cuda()),
        *(torch.nn.BatchNorm1d(2, device=device), torch.nn.BatchNorm1d(2).to_empty(device=device)),
    ):
        for tensor in (*module.parameters(), *module.buffers()):
            assert tensor.device.type == "cuda"
            assert tensor.type().startswith("torch.cuda.")
        assert isinstance(module.weight, torch.nn.Parameter)
        module.to("cpu")
        for tensor in (*module.parameters(), *module.buffers()):
            assert tensor.device.type == "cpu"
    assert moved(device, torch.float64).weight.dtype == torch.float64
    assert moved(torch.float64).weight.device.type == "cpu"
