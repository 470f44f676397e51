"""gloo answers every collective that Megatron Core and Transformer Engine ask of NCCL, with exact results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2


def worker(rank: int, store_file: str) -> None:
    import torch
    import torch.distributed as dist

    from megatron_fp8.cpu import install

    install()
    # All of these are a GPU program's tensors.
    torch.set_default_device("cuda")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{store_file}",
        rank=rank,
        world_size=WORLD,
        device_id=torch.device("cuda", rank),
    )
    pair = dist.new_group([0, 1], backend="nccl", pg_options=object())
    assert dist.get_backend(pair) == "gloo"
    assert pair._get_backend(torch.device("cuda")) is not None
    dist.barrier(group=pair, device_ids=[rank])
    for check in (moves, reductions, coalesced, coalesced_types, crossing_messages, freed_after_isend):
        check(rank, pair)
    dist.destroy_process_group()


def moves(rank: int, group: Any) -> None:
    import torch
    import torch.distributed as dist

    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool]
    for dtype in [*dtypes, torch.float8_e4m3fn, torch.float8_e5m2]:
        mine = (torch.arange(4, device="cuda") + 4 * rank).to(dtype)
        both = torch.arange(8).to(dtype)

        gathered = torch.empty(8, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(gathered, mine, group=group)
        assert equal(gathered, both)
        parts = [torch.empty(4, dtype=dtype) for _ in range(WORLD)]
        work = dist.all_gather(parts, mine, group=group, async_op=True)
        work.wait()
        assert equal(torch.cat([part.float() for part in parts]), both.float())
        exchanged = torch.empty(4, dtype=dtype)
        dist.all_to_all_single(exchanged, mine, group=group)
        assert equal(exchanged, both.view(2, 2, 2)[:, rank].reshape(4))
        dist.broadcast(mine, src=1, group=group)
        assert equal(mine, both[4:])


def equal(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.float().tolist() == b.float().tolist()


def reductions(rank: int, group: Any) -> None:
    import torch
    import torch.distributed as dist

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ops = {dist.ReduceOp.SUM: 5.0, dist.ReduceOp.AVG: 2.5, dist.ReduceOp.MAX: 4.0, dist.ReduceOp.MIN: 1.0}
        for op, expected in ops.items():
            value = torch.full((3,), 1.0 + 3 * rank, dtype=dtype, device="cuda")
            dist.all_reduce(value, op=op, group=group)
            assert value.tolist() == [expected] * 3
            if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                whole = torch.full((4,), 1.0 + 3 * rank, dtype=dtype)
                part = torch.empty(2, dtype=dtype)
                dist.reduce_scatter_tensor(part, whole, op=op, group=group)
                assert part.tolist() == [expected] * 2


def coalesced(rank: int, group: Any) -> None:
    """As Megatron Core's distributed optimizer does, with views of one buffer as inputs and outputs."""
    import torch
    from torch.distributed import all_gather_into_tensor, distributed_c10d, reduce_scatter_tensor

    buffers = [torch.arange(4.0) + 10 * rank + 100 * index for index in range(3)]
    with distributed_c10d._coalescing_manager(group, async_ops=True) as work:
        for buffer in buffers:
            reduce_scatter_tensor(buffer.view(2, 2)[rank], buffer, group=group, async_op=True)
    work.wait()
    for index, buffer in enumerate(buffers):
        total = 2 * torch.arange(4.0) + 10 + 200 * index
        assert torch.equal(buffer.view(2, 2)[rank], total.view(2, 2)[rank])
    with distributed_c10d._coalescing_manager(group, async_ops=True) as work:
        for buffer in buffers:
            all_gather_into_tensor(buffer, buffer.view(2, 2)[rank], group=group, async_op=True)
    work.wait()
    for index, buffer in enumerate(buffers):
        assert torch.equal(buffer, 2 * torch.arange(4.0) + 10 + 200 * index)


def coalesced_types(rank: int, group: Any) -> None:
    """FP8 and BF16 parameters in one group, and Transformer Engine's group, which names a device."""
    import torch
    import torch.distributed as dist

    for options in ({}, {"device": torch.device("cuda", rank)}):
        whole = {
            dtype: torch.arange(size, device="cuda").to(dtype).view(2, -1, 2)
            for dtype, size in ((torch.bfloat16, 12), (torch.uint8, 8), (torch.float32, 4), (torch.float8_e5m2, 4))
        }
        gathered = {dtype: torch.empty_like(value.flatten(0, 1)) for dtype, value in whole.items()}
        with dist._coalescing_manager(group=group, async_ops=True, **options) as work:
            for dtype, value in whole.items():
                dist.all_gather_into_tensor(gathered[dtype], value[rank], group=group, async_op=True)
        work.wait()
        for dtype, value in whole.items():
            assert equal(gathered[dtype], value.flatten(0, 1)), dtype


def crossing_messages(rank: int, group: Any) -> None:
    import torch
    import torch.distributed as dist

    other = 1 - rank
    received = [torch.empty(3, device="cuda") for _ in range(2)]
    operations = []
    for index, buffer in enumerate(received):
        sent = torch.full((3,), 10.0 * rank + index, device="cuda")
        operations.append(dist.P2POp(dist.isend, sent, other, group))
        operations.append(dist.P2POp(dist.irecv, buffer, other, group))
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    assert [buffer[0].item() for buffer in received] == [10.0 * other, 10.0 * other + 1]


def freed_after_isend(rank: int, group: Any) -> None:
    """Megatron Core gives a pipeline stage's output back while it is being sent; the message must not change."""
    import torch
    import torch.distributed as dist

    size = 4 * 2**20
    if rank == 0:
        output = torch.full((size,), 3.0)
        request = dist.isend(output, 1, group=group)
        output.data = torch.empty(1)
        poison = [torch.full((size,), -1.0) for _ in range(4)]
        dist.barrier(group=group)
        request.wait()
        assert len(poison) == 4
    else:
        dist.barrier(group=group)
        received = torch.empty(size)
        dist.recv(received, 0, group=group)
        assert (received == 3).all()


def test_two_ranks(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-5000:]


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
