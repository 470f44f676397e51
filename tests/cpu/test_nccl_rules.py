"""What NCCL refuses, refused in its groups; ranks whose calls differ are named; gloo's own groups keep gloo's rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fp8.cpu.placement import put_on_host
from tests.ranks import run_on_ranks

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX


def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.zeros(shape or (4,), device="cuda").to(dtype)


FLOAT = torch.float32
HOST, OUT_OF_ORDER = put_on_host(torch.zeros(4)), of(FLOAT, 2, 4).t()
# By name: the call, the error's class and words. Both ranks make each of these calls.
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    **{
        f"{name} of {dtype}": (
            lambda name=name, dtype=dtype: dist.all_reduce(of(dtype), op=getattr(dist.ReduceOp, name)),
            *(ValueError, f"Cannot use ReduceOp.{name} with NCCL"),
        )
        for name in ("BAND", "BOR", "BXOR")
        for dtype in (torch.int32, torch.uint8)
    },
    **{
        f"all_reduce of {dtype}": (
            lambda dtype=dtype: dist.all_reduce(of(dtype)),
            *(TypeError, f"not supported for NCCL process group: {dtype}"),
        )
        for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu)
    },
    "AVG of bool": (lambda: dist.all_reduce(of(torch.bool), op=AVG), TypeError, "AVG with boolean inputs"),
    "MAX of complex": (lambda: dist.all_reduce(of(torch.complex64), op=MAX), RuntimeError, "MAX on complex tensors"),
    "PREMUL_SUM of int32": (
        lambda: dist.all_reduce(of(torch.int32), op=dist._make_nccl_premul_sum(2.0)),
        *(TypeError, "must be half, float, bfloat16 or double"),
    ),
    "SUM of float8 without negative zero": (
        lambda: dist.all_reduce(of(torch.float8_e4m3fnuz)),
        *(RuntimeError, "Unsupported Float8 type"),
    ),
    **{
        f"{name} of {dtype}": (
            lambda call=call, dtype=dtype: call(dtype),
            *(NotImplementedError, f"reductions of {dtype} are not emulated"),
        )
        for name, call in {
            "all_reduce": lambda dtype: dist.all_reduce(of(dtype)),
            "reduce": lambda dtype: dist.reduce(of(dtype), 0),
            "reduce_scatter_tensor": lambda dtype: dist.reduce_scatter_tensor(of(dtype, 2), of(dtype, 4)),
        }.items()
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    },
    "reduce BAND": (lambda: dist.reduce(of(torch.int32), 0, dist.ReduceOp.BAND), ValueError, "BAND with NCCL"),
    "reduce_scatter BXOR": (
        lambda: dist.reduce_scatter_tensor(of(torch.int32, 2), of(torch.int32, 4), dist.ReduceOp.BXOR),
        *(ValueError, "BXOR with NCCL"),
    ),
    "broadcast of int16": (lambda: dist.broadcast(of(torch.int16), 0), TypeError, "torch.int16"),
    **{
        f"host tensor in {name}": (lambda call=call: call(HOST), RuntimeError, "device type cpu")
        for name, call in {
            "all_reduce": dist.all_reduce,
            "broadcast": lambda tensor: dist.broadcast(tensor, 0),
            "reduce": lambda tensor: dist.reduce(tensor, 0),
            "all_gather": lambda tensor: dist.all_gather([of(FLOAT), of(FLOAT)], tensor),
            "all_gather's list": lambda tensor: dist.all_gather([tensor, of(FLOAT)], of(FLOAT)),
            "all_gather_into_tensor": lambda tensor: dist.all_gather_into_tensor(of(FLOAT, 8), tensor),
            "reduce_scatter": lambda tensor: dist.reduce_scatter(of(FLOAT), [tensor, of(FLOAT)]),
            "reduce_scatter_tensor": lambda tensor: dist.reduce_scatter_tensor(tensor, of(FLOAT, 8)),
            "all_to_all": lambda tensor: dist.all_to_all([of(FLOAT), of(FLOAT)], [tensor, of(FLOAT)]),
            "all_to_all_single": lambda tensor: dist.all_to_all_single(of(FLOAT), tensor),
            "gather": lambda tensor: dist.gather(tensor, [of(FLOAT), of(FLOAT)] if dist.get_rank() == 0 else None),
            "scatter": lambda tensor: dist.scatter(tensor, [of(FLOAT), of(FLOAT)] if dist.get_rank() == 0 else None),
            "send": lambda tensor: dist.send(tensor, 1 - dist.get_rank()),
            "irecv": lambda tensor: dist.irecv(tensor, 1 - dist.get_rank()),
        }.items()
    },
    "memory out of order": (lambda: dist.all_reduce(OUT_OF_ORDER), ValueError, "Tensors must be contiguous"),
    "memory out of order, sent": (
        lambda: dist.isend(OUT_OF_ORDER, 1 - dist.get_rank()),
        *(ValueError, "Tensors must be contiguous"),
    ),
    "sparse": (lambda: dist.all_reduce(of(FLOAT).to_sparse()), ValueError, "CUDA and dense"),
    "gathered into too little": (
        lambda: dist.all_gather_into_tensor(of(FLOAT, 7), of(FLOAT, 4)),
        *(ValueError, "7 elements are not 2 x 4"),
    ),
    "gathered into another dtype": (
        lambda: dist.all_gather_into_tensor(of(torch.float16, 8), of(FLOAT, 4)),
        *(TypeError, "must have the same type"),
    ),
    "scattered from too much": (
        lambda: dist.reduce_scatter_tensor(of(FLOAT, 4), of(FLOAT, 9)),
        *(ValueError, "9 elements are not 2 x 4"),
    ),
    "exchange of an odd number": (
        lambda: dist.all_to_all_single(of(FLOAT, 3), of(FLOAT, 3)),
        *(RuntimeError, "does not divide equally"),
    ),
    "from any rank": (lambda: dist.recv(of(FLOAT)), RuntimeError, "does not support recvAnysource"),
    "all_gather_coalesced": (
        lambda: dist.all_gather_coalesced([[of(FLOAT)] * 2], [of(FLOAT)]),
        *(RuntimeError, "does not support allgather_coalesced"),
    ),
    "monitored_barrier": (dist.monitored_barrier, ValueError, "only implemented for GLOO"),
}


def try_all() -> dict[str, str]:
    """What each call of REFUSED raised."""
    raised = {}
    for name, (call, _, _) in REFUSED.items():
        try:
            call()
            raised[name] = "nothing"
        except Exception as error:  # noqa: BLE001 - compared in the test
            raised[name] = f"{type(error).__name__}: {error}"
    # Refused calls count for nothing, and both kinds of barrier work.
    dist.barrier()
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    assert objects == [{"rank": 0}, {"rank": 1}]
    raised["gloo"] = gloos_rules()
    return raised


def gloos_rules() -> str:
    """A group that was asked for as gloo's reduces with what NCCL lacks, and has its own barrier."""
    group = dist.new_group(backend="gloo")
    bits = put_on_host(torch.tensor([5 + dist.get_rank()], dtype=torch.int32))
    dist.all_reduce(bits, op=dist.ReduceOp.BAND, group=group)
    dist.monitored_barrier(group)
    return str(bits.item())


@pytest.fixture(scope="module")
def raised() -> list[dict[str, str]]:
    return run_on_ranks(2, try_all)


@pytest.mark.parametrize("name", REFUSED)
def test_what_nccl_refuses(name: str, raised: list[dict[str, str]]) -> None:
    _, kind, words = REFUSED[name]
    for answers in raised:
        assert re.match(f"{kind.__name__}: .*{re.escape(words)}", answers[name], re.DOTALL), answers[name]


def test_gloos_groups_keep_gloos_rules(raised: list[dict[str, str]]) -> None:
    assert [answers["gloo"] for answers in raised] == ["4", "4"]


def test_nccl_is_available() -> None:
    assert dist.is_nccl_available()


# By name: what rank 0 calls first and rank 1 then, each with the group, and the words of rank 1's error.
Call = Callable[[Any], Any]
DIFFER: dict[str, tuple[list[Call], list[Call], str]] = {
    "order": (
        [
            lambda group: dist.all_reduce(of(FLOAT), group=group, async_op=True),
            lambda group: dist.broadcast(of(torch.int64, 2), 0, group=group, async_op=True),
        ],
        [lambda group: dist.broadcast(of(torch.int64, 2), 0, group=group)],
        r"collective 1 of process group .* of ranks \[0, 1\]: NCCL would hang .*\n"
        r" *rank 1: broadcast\(int64 x 2, from 0\)\n"
        r" *rank 0: all_reduce\(SUM, float32 x 4\); then broadcast\(int64 x 2, from 0\)\n"
        r" *previous calls of both, at most 6: none",
    ),
    "dtype": (
        [lambda group: dist.all_reduce(of(FLOAT), group=group, async_op=True)],
        [lambda group: dist.all_reduce(of(torch.bfloat16), group=group)],
        r"rank 1: all_reduce\(SUM, bfloat16 x 4\)\n *rank 0: all_reduce\(SUM, float32 x 4\)",
    ),
    "size": (
        [lambda group: dist.all_reduce(of(FLOAT, 8), group=group, async_op=True)],
        [lambda group: dist.all_reduce(of(FLOAT), group=group)],
        r"float32 x 4\)\n *rank 0: all_reduce\(SUM, float32 x 8\)",
    ),
    "operation": (
        [lambda group: dist.all_reduce(of(FLOAT), op=MAX, group=group, async_op=True)],
        [lambda group: dist.all_reduce(of(FLOAT), group=group)],
        r"SUM, .*\n *rank 0: all_reduce\(MAX",
    ),
    "root": (
        [lambda group: dist.broadcast(of(FLOAT), 0, group=group, async_op=True)],
        [lambda group: dist.broadcast(of(FLOAT), 1, group=group)],
        r"from 1\)\n *rank 0: broadcast\(float32 x 4, from 0\)",
    ),
    "in a coalesced group": (
        [lambda group: coalesced(group, [8, 4])],
        [lambda group: coalesced(group, [4, 8])],
        r"rank 1: all_gather_into_tensor\(float32 x 4 a rank\)\n *rank 0: all_gather_into_tensor\(float32 x 8 a rank\)",
    ),
    "size of a message": (
        [lambda group: dist.isend(of(FLOAT, 8), 1, group=group)],
        [lambda group: dist.irecv(of(FLOAT, 4), 0, group=group)],
        r"message 1 of .*\n *rank 1: float32 x 4 from 0 to 1\n *rank 0: float32 x 8 from 0 to 1",
    ),
    "both send first": (
        [lambda group: dist.isend(of(FLOAT), 1, group=group)],
        [lambda group: dist.isend(of(FLOAT), 0, group=group)],
        r"rank 1: float32 x 4 from 1 to 0\n *rank 0: float32 x 4 from 0 to 1",
    ),
    "order of messages in a batch": (
        [lambda group: batch(dist.isend, 1, [8, 4], group)],
        [lambda group: batch(dist.irecv, 0, [4, 8], group)],
        r"batched message 1 of .*\n *rank 1: float32 x 4 from 0 to 1",
    ),
}


def coalesced(group: Any, sizes: list[int]) -> Any:
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as work:
        for size in sizes:
            dist.all_gather_into_tensor(of(FLOAT, 2 * size), of(FLOAT, size), group=group, async_op=True)
    return work


def batch(function: Any, peer: int, sizes: list[int], group: Any) -> Any:
    return dist.batch_isend_irecv([dist.P2POp(function, of(FLOAT, size), peer, group) for size in sizes])


def differ() -> dict[str, str]:
    """The error of this rank in each case: rank 0 calls first, waits for nothing, and meets none."""
    errors, requests = {}, []
    for name, calls in DIFFER.items():
        group = dist.new_group()
        if dist.get_rank() == 0:
            requests += [call(group) for call in calls[0]]
        dist.barrier()
        if dist.get_rank() == 1:
            try:
                calls[1][0](group)
                errors[name] = "nothing"
            except RuntimeError as error:
                errors[name] = str(error)
        dist.barrier()
    assert len(requests) == (sum(len(calls[0]) for calls in DIFFER.values()) if dist.get_rank() == 0 else 0)
    return errors


@pytest.fixture(scope="module")
def differences() -> dict[str, str]:
    return run_on_ranks(2, differ)[1]


@pytest.mark.parametrize("name", DIFFER)
def test_ranks_that_differ_are_named_with_their_calls(name: str, differences: dict[str, str]) -> None:
    assert re.search(DIFFER[name][2], differences[name]), differences[name]


def many_calls() -> None:
    """Messages that cross in a batch are in order, old calls leave the store, and a second start begins anew."""
    store = dist.distributed_c10d._get_default_store()
    other = 1 - dist.get_rank()
    received = of(FLOAT)
    both = [dist.P2POp(dist.isend, of(FLOAT), other), dist.P2POp(dist.irecv, received, other)]
    for request in dist.batch_isend_irecv(both if other else both[::-1]):
        request.wait()
    before = store.num_keys() if hasattr(store, "num_keys") else 0
    for _ in range(1500):
        dist.all_reduce(of(FLOAT, 1))
    dist.barrier()
    assert store.num_keys() < before + 1200


def test_many_calls_leave_few_keys() -> None:
    run_on_ranks(2, many_calls)
