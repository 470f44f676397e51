"""What CUDA refuses of host and GPU tensors, and what it takes, on the stand-in.

Which of the two each case is comes from CUDA: TensorIterator's and the index kernels' checks in ATen, and the
documentation of torch.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_fp8.cpu import install

install()

import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer, Float8Tensor  # noqa: E402

from megatron_fp8.cpu.placement import expect_on_gpu, is_on_host, two_devices  # noqa: E402

Both = Callable[[Tensor, Tensor], object]
TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"

# Of a host tensor h and a GPU tensor g, both [4, 4] and positive.
REFUSED: dict[str, Both] = {
    "h + g": lambda h, g: h + g,
    "g + h": lambda h, g: g + h,
    "g + [1]": lambda h, g: g + h[0, :1],
    "[] on the GPU + h": lambda h, g: g[0, 0] + h,
    "in place": lambda h, g: g.add_(h),
    "+=": lambda h, g: g.__iadd__(h),
    "into a number": lambda h, g: h[0, 0].add_(g[0, 0]),
    "out": lambda h, g: torch.add(g, g, out=h),
    "compare": lambda h, g: g == h,
    "equal": lambda h, g: torch.equal(g, h),
    "allclose": lambda h, g: torch.allclose(h, g),
    "matmul": lambda h, g: g @ h,
    "mm": lambda h, g: torch.mm(h, g),
    "bmm": lambda h, g: torch.bmm(g[None], h[None]),
    "addmm": lambda h, g: torch.addmm(h, g, g),
    "einsum": lambda h, g: torch.einsum("ij,jk->ik", g, h),
    "linear": lambda h, g: F.linear(g, h),
    "bias": lambda h, g: F.linear(g, g, h[0]),
    "cat": lambda h, g: torch.cat([g, h]),
    "stack of numbers": lambda h, g: torch.stack([g[0, 0], h[0, 0]]),
    "where": lambda h, g: torch.where(h > 0, g, g),
    "where value": lambda h, g: torch.where(g > 0, g, h),
    "mask": lambda h, g: g.masked_fill(h > 0, 0.0),
    "masked select": lambda h, g: g.masked_select(h > 0),
    "gather": lambda h, g: g.gather(0, h.long() % 4),
    "scatter": lambda h, g: g.scatter_(0, g.long() % 4, h),
    "index_select": lambda h, g: g.index_select(0, h[0].long() % 4),
    "index_add": lambda h, g: g.index_add_(0, g[0].long() % 4, h),
    "take": lambda h, g: g.take(h.long() % 4),
    "host indexed by the GPU": lambda h, g: h[g.long() % 4],
    "assigned by an index": lambda h, g: g.__setitem__(g[0].long() % 4, h),
    "embedding": lambda h, g: F.embedding(h.long() % 4, g),
    "cross entropy": lambda h, g: F.cross_entropy(g, h[0].long() % 4),
    "layer norm": lambda h, g: F.layer_norm(g, (4,), h[0]),
    "attention": lambda h, g: F.scaled_dot_product_attention(g[None], h[None], g[None]),
    "foreach": lambda h, g: torch._foreach_add_([g], [h]),
    "aten": lambda h, g: torch.ops.aten.mul(g, h),
    "overload": lambda h, g: torch.ops.aten.mul.Tensor(g, h),
    "gradient": lambda h, g: setattr(g, "grad", h),
    "lerp": lambda h, g: g.lerp(h, 0.5),
}
TAKEN: dict[str, Both] = {
    "+ number": lambda h, g: g + h[0, 0],
    "number +": lambda h, g: h[0, 0] + g,
    "number -": lambda h, g: h[0, 0] - g,
    "number in place": lambda h, g: g.mul_(h[0, 0]),
    "numbers of both": lambda h, g: g[0, 0] * h[0, 0],
    "power": lambda h, g: h[0, 0] ** g,
    "compare with a number": lambda h, g: g < h[0, 0],
    "maximum": lambda h, g: torch.maximum(g, h[0, 0]),
    "clamp": lambda h, g: g.clamp(min=h[0, 0]),
    "where with a number": lambda h, g: torch.where(g > 0, g, h[0, 0]),
    "masked_fill with a number": lambda h, g: g.masked_fill(g > 0, h[0, 0]),
    "fill": lambda h, g: g.fill_(h[0, 0]),
    "full": lambda h, g: torch.full((2,), h[0, 0].item(), device=g.device),
    "copy": lambda h, g: g.copy_(h),
    "foreach copy": lambda h, g: (torch._foreach_copy_([g], [h]), g)[1],
    "indexed by the host": lambda h, g: g[h[0].long() % 4],
    "masked by the host": lambda h, g: g[h > 0],
    "indexed twice": lambda h, g: g[h[0].long() % 4, g[0].long() % 4],
    "to": lambda h, g: h.to(g),
    "type_as": lambda h, g: h.type_as(g),
    "new_tensor": lambda h, g: g.new_tensor(h),
    "expand_as": lambda h, g: g[0].expand_as(h),
    "view_as": lambda h, g: g.view_as(h),
    "foreach with a number": lambda h, g: torch._foreach_mul([g], h[0, 1])[0],
}


@pytest.fixture
def host() -> Tensor:
    return torch.arange(1.0, 17.0).view(4, 4)


@pytest.fixture
def gpu(host: Tensor) -> Tensor:
    return host.cuda()


@pytest.mark.parametrize("name", REFUSED)
def test_cuda_refuses(name: str, host: Tensor, gpu: Tensor) -> None:
    before = host.clone(), gpu.clone()
    with pytest.raises(RuntimeError, match="device"):
        REFUSED[name](host, gpu)
    assert torch.equal(host, before[0])
    assert torch.equal(gpu, before[1])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_works_on_one_device(name: str, host: Tensor) -> None:
    for tensor in (host, host.cuda()):
        REFUSED[name](tensor.clone(), tensor.clone())


@pytest.mark.parametrize("name", TAKEN)
def test_cuda_takes(name: str, host: Tensor, gpu: Tensor) -> None:
    expected = TAKEN[name](host.clone(), host.clone())
    found = TAKEN[name](host, gpu)
    assert isinstance(found, Tensor)
    assert found.is_cuda
    assert torch.equal(found.cpu(), expected)


def test_assignments_to_parts_copy(host: Tensor, gpu: Tensor) -> None:
    gpu[0] = host[1]
    gpu[1:3] = host[:2]
    gpu[3, 0] = host[0, 3]
    gpu[gpu > 1e6] = host[0, 0]
    assert gpu[0].tolist() == host[1].tolist()
    host[0] = gpu[1]
    assert not host.is_cuda
    assert gpu.is_cuda


def test_results_are_where_their_operands_are(host: Tensor, gpu: Tensor) -> None:
    for tensor in (host, gpu, torch.nn.Parameter(host), torch.nn.Parameter(gpu)):
        results = [
            *(tensor + 1, tensor @ tensor, tensor[0], tensor.t(), tensor.detach(), tensor.double(), tensor.clone()),
            *(tensor.split(2)), *tensor.max(dim=0), *torch.unbind(tensor), tensor.new_zeros(2), torch.ones_like(tensor),
            *(F.softmax(tensor, -1), torch.cat([tensor, tensor]), tensor.data), copy.deepcopy(tensor),
            torch.tensor(tensor),
        ]  # fmt: skip
        assert {each.device for each in results} == {tensor.device}
        assert type(copy.deepcopy(tensor)) is type(tensor)


def test_gradients_are_where_their_tensors_are(host: Tensor) -> None:
    leaf = host.clone().requires_grad_()
    moved = leaf.cuda()
    (moved * moved).sum().backward()
    assert leaf.grad is not None
    assert not leaf.grad.is_cuda
    assert torch.equal(leaf.grad, 2 * host)
    (leaf * host).sum().backward()
    assert torch.equal(leaf.grad, 3 * host)
    (found,) = torch.autograd.grad((leaf * host).sum(), leaf)
    assert torch.equal(found, host)


class Doubled(torch.autograd.Function):
    """Whose backward mixes where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.other = other
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.other + 0 * ctx.saved_tensors[0], None


def test_backward_is_looked_at(host: Tensor, gpu: Tensor) -> None:
    x = gpu.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="found at least two devices"):
        Doubled.apply(x, host).sum().backward()
    for tensor in (host, gpu):
        x = tensor.clone().requires_grad_()
        Doubled.apply(x, tensor).sum().backward()
        assert torch.equal(x.grad, tensor)


def test_the_host_is_indexed_by_a_number_of_the_gpu(host: Tensor, gpu: Tensor) -> None:
    two = gpu[0, 1].long()
    assert torch.equal(host[two], host[2])
    assert torch.equal(host[1, two], host[1, 2])
    host[two] = 0.0
    assert not host[2].any()
    with pytest.raises(RuntimeError, match="indices should be"):
        host[two > 0]


def test_gradients_from_elsewhere_are_refused(host: Tensor, gpu: Tensor) -> None:
    for here, elsewhere in ((gpu, host), (host, gpu)):
        message = f"invalid gradient at index 0 - expected device {here.device} but got {elsewhere.device}"
        x = here.clone().requires_grad_()
        with pytest.raises(RuntimeError, match=message):
            (x * 2).backward(elsewhere)
        with pytest.raises(RuntimeError, match=message):
            torch.autograd.backward([x * 2], [elsewhere])
        with pytest.raises(RuntimeError, match=message):
            torch.autograd.grad(x * 2, x, elsewhere)
        assert x.grad is None
        (x * 2).backward(here)
        assert torch.equal(x.grad, 2 * here)


def test_other_threads_are_looked_at(host: Tensor, gpu: Tensor) -> None:
    seen: list[Any] = []

    def work() -> None:
        seen.append(torch.ones(2).is_cuda)
        try:
            seen.append(host + gpu)
        except RuntimeError as error:
            seen.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0] is False
    assert TWO_DEVICES in seen[1]


def test_numpy_is_the_hosts(host: Tensor, gpu: Tensor) -> None:
    array = np.ones(3, dtype=np.float32)
    assert not torch.from_numpy(array).is_cuda
    assert not torch.as_tensor(array).is_cuda
    assert torch.as_tensor(array).data_ptr() == array.ctypes.data
    assert torch.as_tensor(array, device="cuda").data_ptr() != array.ctypes.data
    for read in (Tensor.numpy, np.asarray, lambda tensor: tensor.__array__()):
        read(host)
        with pytest.raises(TypeError, match=r"can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu\(\)"):
            read(gpu)
    assert gpu.numpy(force=True).sum() == host.sum()


def test_old_constructors_make_host_tensors(host: Tensor, gpu: Tensor) -> None:
    for made in (torch.Tensor(2), torch.Tensor([1.0]), torch.FloatTensor(2), torch.LongTensor([1])):
        assert not made.is_cuda
    assert torch.cuda.FloatTensor(2).is_cuda
    assert isinstance(host, torch.FloatTensor)
    assert not isinstance(gpu, torch.FloatTensor)
    assert isinstance(gpu, torch.cuda.FloatTensor)
    assert not isinstance(host, torch.cuda.FloatTensor)


def test_a_parameter_moves_with_its_data(host: Tensor, gpu: Tensor) -> None:
    parameter = torch.nn.Parameter(host)
    parameter.data = gpu
    assert parameter.is_cuda
    assert isinstance(parameter, torch.nn.Parameter)
    with pytest.raises(RuntimeError, match="found at least two devices"):
        parameter + host
    parameter.data = host
    assert not parameter.is_cuda


def test_texts_name_the_gpu(host: Tensor, gpu: Tensor) -> None:
    assert repr(gpu[0, 0]) == "tensor(1., device='cuda:0')"
    assert repr(host[0, 0]) == "tensor(1.)"
    assert repr(torch.nn.Parameter(host[0, 0])) == "Parameter containing:\ntensor(1., requires_grad=True)"


def test_optimizers_refuse_mixed_lists(host: Tensor, gpu: Tensor) -> None:
    parameter = torch.nn.Parameter(gpu)
    with pytest.raises(RuntimeError, match="different device"):
        parameter.grad = host
    skip = torch.zeros(1, dtype=torch.int32, device="cuda")
    tex.multi_tensor_scale(65536, skip, [[gpu], [gpu]], 2.0)
    for lists, flag in (([[gpu], [host]], skip), ([[host], [gpu]], skip), ([[gpu], [gpu]], skip.cpu())):
        with pytest.raises(RuntimeError, match="multi_tensor_scale"):
            tex.multi_tensor_scale(65536, flag, lists, 2.0)


def test_kernels_refuse_host_tensors(host: Tensor) -> None:
    x = torch.randn(16, 16)
    quantizer = Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, device=torch.device("cuda"))
    with pytest.raises(RuntimeError, match=r"quantize"):
        tex.quantize(x, quantizer)
    with pytest.raises(RuntimeError, match=r"rmsnorm_fwd"):
        tex.rmsnorm_fwd(x.cuda(), x[0], 1e-5, None, None, tex.DType.kFloat32, 0, False)
    quantized = quantizer(x.cuda())
    assert quantized.is_cuda
    assert quantized._data.is_cuda
    for moved in (quantized.cpu(), quantized.to("cpu"), quantized.to(device=torch.device("cpu"))):
        assert isinstance(moved, Float8Tensor)
        assert [each.device.type for each in (moved, moved._data, moved._scale_inv)] == ["cpu"] * 3
        assert is_on_host(moved)
        with pytest.raises(RuntimeError, match=r"argument 0 of .*dequantize"):
            tex.dequantize(moved, tex.DType.kFloat32)
        back = moved.cuda()
        assert [each.device.type for each in (back, back._data, back._scale_inv)] == ["cuda"] * 3
        assert torch.equal(back.dequantize(), quantized.dequantize())


def test_the_helpers_for_other_parts(host: Tensor, gpu: Tensor) -> None:
    assert (is_on_host(host), is_on_host(gpu), is_on_host(torch.ones(1, device="meta"))) == (True, False, False)
    expect_on_gpu("ncclAllReduce", gpu, [gpu, (gpu,)], 3, None)
    with pytest.raises(RuntimeError, match=f"{TWO_DEVICES} .*ncclAllGather"):
        expect_on_gpu("ncclAllGather", gpu, [gpu, (host,)])
    assert "cuda:3 and cpu" in str(two_devices("x", 3))


# Pinned memory and copies that are not waited for.


def test_pinned_memory(host: Tensor, gpu: Tensor) -> None:
    assert not host.is_pinned()
    pinned = host.pin_memory()
    for tensor in (
        pinned,
        pinned[1],
        pinned.view(-1),
        torch.empty(2, pin_memory=True),
        host.new_empty(2, pin_memory=True),
    ):
        assert tensor.is_pinned()
        assert not tensor.is_cuda
    assert pinned.data_ptr() != host.data_ptr()
    assert pinned.pin_memory() is pinned
    assert not pinned.clone().is_pinned()
    assert not gpu.is_pinned()
    with pytest.raises(RuntimeError, match=r"cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"):
        gpu.pin_memory()
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(2, device="cuda", pin_memory=True)


def test_a_loader_pins() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(6.0))
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True):
        assert batch.is_pinned()
        assert batch.cuda(non_blocking=True).is_cuda


WAITS: dict[str, Callable[[Tensor, torch.cuda.Event], object]] = {
    "device": lambda gpu, event: torch.cuda.synchronize(),
    "stream": lambda gpu, event: torch.cuda.current_stream().synchronize(),
    "stream asked": lambda gpu, event: torch.cuda.current_stream().query(),
    "event": lambda gpu, event: event.synchronize(),
    "item": lambda gpu, event: gpu[0, 0].item(),
    "bool": lambda gpu, event: bool(gpu[0, 0] > 0),
    "cpu": lambda gpu, event: gpu.cpu(),
    "copy": lambda gpu, event: torch.empty(4, 4).copy_(gpu),
}
READS: list[Callable[[Tensor], object]] = [
    lambda x: x + 1,
    lambda x: x.tolist(),
    lambda x: x.numpy(),
    lambda x: x.view(-1)[0].item(),
    lambda x: x.sum(),
    lambda x: x.cuda(),
    lambda x: x.fill_(0),
]


def unfinished(gpu: Tensor) -> Iterator[Tensor]:
    yield torch.empty(4, 4, pin_memory=True).copy_(gpu, non_blocking=True)
    yield gpu.to("cpu", non_blocking=True)


@pytest.mark.parametrize("way", WAITS)
def test_a_copy_to_the_host_is_waited_for(way: str, gpu: Tensor) -> None:
    for copied in unfinished(gpu):
        event = torch.cuda.Event()
        event.record()
        assert copied.shape == (4, 4)
        for read in READS:
            with pytest.raises(RuntimeError, match="a non-blocking copy still writes to"):
                read(copied)
        WAITS[way](gpu, event)
        for read in READS:
            read(copied)


def test_waiting_for_something_else_does_not_help(gpu: Tensor) -> None:
    early, side = torch.cuda.Event(), torch.cuda.Stream()
    early.record()
    copied = gpu.to("cpu", non_blocking=True)
    early.synchronize()
    side.synchronize()
    with pytest.raises(RuntimeError, match="non-blocking"):
        copied.sum()
    side.wait_stream(torch.cuda.current_stream())
    side.record_event().synchronize()
    assert copied.sum() == gpu.sum().item()


def test_a_pinned_source_is_not_overwritten_early(host: Tensor) -> None:
    pinned = host.pin_memory()
    moved = pinned.to("cuda", non_blocking=True)
    assert pinned.sum() == host.sum()
    for write in (lambda: pinned.zero_(), lambda: pinned.__setitem__(0, 1.0), lambda: torch.add(host, 1, out=pinned)):
        with pytest.raises(RuntimeError, match="a non-blocking copy still reads"):
            write()
    torch.cuda.synchronize()
    pinned.zero_()
    assert torch.equal(moved.cpu(), host)


def test_pageable_memory_is_waited_for_by_cuda(gpu: Tensor) -> None:
    assert torch.empty(4, 4).copy_(gpu, non_blocking=True).sum() == gpu.sum().item()


# Random numbers.


def test_host_and_gpu_draw_from_generators_of_their_own() -> None:
    def after(act: Callable[[], object], device: str) -> list[float]:
        torch.manual_seed(42)
        act()
        return torch.rand(3, device=device).tolist()

    expected = after(lambda: None, "cpu")
    for act in (
        lambda: torch.cuda.manual_seed(41),
        lambda: torch.rand(5, device="cuda"),
        lambda: F.dropout(torch.ones(9, device="cuda")),
        lambda: torch.ones(9, device="cuda").normal_(),
        lambda: torch.randn_like(torch.ones(9, device="cuda")),
        lambda: torch.rand_like(torch.ones(9), device="cuda"),
    ):
        assert after(act, "cpu") == expected
    expected = after(lambda: None, "cuda")
    for act in (
        lambda: torch.rand(5),
        lambda: F.dropout(torch.ones(9)),
        lambda: torch.ones(9).normal_(),
        lambda: torch.nn.Linear(3, 3),
        lambda: torch.randn_like(torch.ones(9)),
        lambda: torch.rand_like(torch.ones(9, device="cuda"), device="cpu"),
        lambda: torch.set_rng_state(torch.get_rng_state()),
        lambda: torch.randperm(9),
        lambda: torch.nn.init.kaiming_uniform_(torch.ones(3, 3)),
    ):
        assert after(act, "cuda") == expected
    assert not torch.get_rng_state().is_cuda
    assert not torch.cuda.get_rng_state().is_cuda


def test_draws_on_the_host_move_the_hosts_state() -> None:
    for draw in (
        lambda: torch.rand(5),
        lambda: F.dropout(torch.ones(9)),
        lambda: torch.ones(9).normal_(),
        lambda: torch.randn_like(torch.ones(9)),
        lambda: torch.bernoulli(torch.full((9,), 0.5)),
        lambda: torch.multinomial(torch.ones(9), 3),
        lambda: torch.nn.init.normal_(torch.ones(9)),
    ):
        torch.manual_seed(7)
        state, gpus = torch.get_rng_state(), torch.cuda.get_rng_state()
        draw()
        assert not torch.equal(torch.get_rng_state(), state)
        assert torch.equal(torch.cuda.get_rng_state(), gpus)


def test_generators_belong_to_a_device() -> None:
    host, gpu = torch.Generator(), torch.Generator("cuda")
    assert (host.device.type, gpu.device.type) == ("cpu", "cuda")
    assert (
        torch.rand(2, generator=host.manual_seed(1)).tolist()
        == torch.rand(2, generator=gpu.manual_seed(1), device="cuda").tolist()
    )
    for wrong in (
        lambda: torch.rand(2, generator=gpu),
        lambda: torch.rand(2, generator=host, device="cuda"),
        lambda: torch.ones(2).normal_(generator=gpu),
        lambda: torch.ones(2, device="cuda").normal_(generator=host),
        lambda: torch.bernoulli(torch.ones(2, device="cuda"), generator=host),
    ):
        with pytest.raises(RuntimeError, match=r"Expected a '\w+' device type for generator but found '\w+'"):
            wrong()
