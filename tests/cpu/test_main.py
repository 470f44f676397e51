"""`python -m megatron_fp8.cpu`: programs written for GPUs, unchanged, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "megatron_fp8.cpu", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def program(folder: Path, text: str, name: str = "program.py") -> str:
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return str(file)


def check(result: subprocess.CompletedProcess[str], code: int = 0) -> str:
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


def test_help_needs_no_torch() -> None:
    hide = "import sys; sys.modules['torch'] = None; import runpy; sys.argv = ['x', '--help']"
    result = subprocess.run(
        [sys.executable, "-c", f"{hide}; runpy.run_module('megatron_fp8.cpu', run_name='__main__')"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "usage: python -m megatron_fp8.cpu" in check(result)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "name a script"),
        (["-m"], "-m needs a module name"),
        (["--fast", "x.py"], "unknown option --fast"),
        (["no_such_file.py"], "no_such_file.py: no such file"),
        (["-m", "no_such_module.main"], "no_such_module.main: no such module"),
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], reason: str) -> None:
    result = run(*arguments)
    check(result, 2)
    assert reason in result.stderr
    assert "usage:" in result.stderr


def test_script_sees_what_plain_python_shows(tmp_path: Path) -> None:
    text = """
        import os, sys
        print(__name__, sys.argv[1:], os.path.basename(sys.argv[0]), os.path.basename(__file__))
        print(os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)))
        import sibling
        print(sys.modules["__main__"].__file__ == __file__)
        if __name__ == "__main__":
            sys.exit(int(sys.argv[1]))
    """
    program(tmp_path, "", "sibling.py")
    script = program(tmp_path, text)
    plain = subprocess.run([sys.executable, script, "3", "-m"], capture_output=True, text=True, timeout=60, check=False)
    assert check(run(script, "3", "-m"), 3) == check(plain, 3)


def test_module_argv_and_uncaught_exception(tmp_path: Path) -> None:
    program(
        tmp_path,
        "import sys; print(sys.argv[1:], __name__, __spec__.name); raise KeyError('lost')",
        "prog.py",
    )
    result = run("-m", "prog", "--help", cwd=tmp_path)
    assert "['--help'] __main__ prog" in check(result, 1)
    assert result.stderr.rstrip().endswith("KeyError: 'lost'")


def test_gpu_program_of_plain_torch(tmp_path: Path) -> None:
    text = """
        import io
        import torch

        assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        host, gpu = torch.ones(3), torch.ones(3, device="cuda")
        assert gpu.is_cuda and gpu.device == torch.device("cuda:0") and gpu.type() == "torch.cuda.FloatTensor"
        assert not host.is_cuda and host.device.type == "cpu" and (host + host).device.type == "cpu"
        assert (gpu * host.cuda()).is_cuda and gpu.get_device() == 0

        moved = host.cuda()
        moved += 1
        assert host.sum() == 3 and moved.to("cuda") is moved
        back = moved.cpu()
        back += 1
        assert moved.sum() == 6 and back.device.type == "cpu"

        model = torch.nn.Linear(3, 3)
        assert model.weight.device.type == "cpu"
        model.cuda()
        assert next(model.parameters()).is_cuda
        with torch.device("cuda"):
            assert torch.zeros(1).is_cuda
        torch.set_default_device("cuda")
        assert torch.zeros(1).is_cuda and torch.get_default_device().type == "cuda"
        torch.set_default_device(None)

        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") == torch.bfloat16
            assert model(gpu[None]).dtype == torch.bfloat16
        scaler = torch.amp.GradScaler("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        scaler.scale(model(gpu[None]).sum()).backward()
        assert model.weight.grad.is_cuda
        scaler.step(optimizer)
        scaler.update()

        stream, start, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() == stream
            start.record()
            torch.randn(200, 200, device=0) @ torch.randn(200, 200, device=torch.device(0))
            end.record()
        torch.cuda.synchronize()
        assert torch.cuda.current_stream() == torch.cuda.default_stream() and start.elapsed_time(end) > 0

        generator = torch.Generator(device="cuda").manual_seed(5)
        torch.cuda.manual_seed_all(5)
        assert torch.equal(torch.rand(9, device="cuda"), torch.rand(9, device="cuda", generator=generator))

        file = io.BytesIO()
        torch.save({"gpu": gpu}, file)
        file.seek(0)
        assert torch.load(file, map_location="cuda")["gpu"].is_cuda
        file.seek(0)
        assert not torch.load(file, map_location="cpu")["gpu"].is_cuda
        before = torch.cuda.memory_allocated()
        kept = torch.ones(2**20, device="cuda")
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == before + 2**22
        assert torch.cuda.mem_get_info()[0] <= torch.cuda.get_device_properties("cuda").total_memory
    """
    check(run(program(tmp_path, text)))


SPAWN = """
    import multiprocessing
    import sys
    import torch

    def child(queue):
        queue.put((torch.ones(1, device="cuda").device.type, torch.cuda.is_available()))

    if __name__ == "__main__":
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        print(queue.get(timeout=60))
        process.join()
        sys.exit(process.exitcode)
"""


def test_spawned_children_are_under_the_stand_in(tmp_path: Path) -> None:
    assert "('cuda', True)" in check(run(program(tmp_path, SPAWN)))


def test_torchrun_workers_are_under_the_stand_in(tmp_path: Path) -> None:
    text = """
        import os
        import pathlib
        import torch

        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
        value = torch.full((2,), rank + 1.0, device="cuda")
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.AVG)
        torch.distributed.barrier(device_ids=[rank])
        answer = f"{torch.cuda.device_count()} {value.tolist()} {value.device}"
        pathlib.Path(__file__).with_name(f"rank{rank}").write_text(answer)
        torch.distributed.destroy_process_group()
    """
    rendezvous = ["--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    check(run("-m", "torch.distributed.run", *rendezvous, program(tmp_path, text)))
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}").read_text() == f"2 [1.5, 1.5] cuda:{rank}"


GPU_TESTS = """
    import pytest
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling
    from megatron.core import parallel_state, tensor_parallel

    @pytest.fixture(scope="module", autouse=True)
    def groups(tmp_path_factory):
        store = tmp_path_factory.mktemp("store") / "file"
        torch.distributed.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_layernorm_linear(dtype):
        layer = te.LayerNormLinear(32, 48, params_dtype=dtype).cuda()
        x = torch.randn(16, 32, dtype=dtype, device="cuda", requires_grad=True)
        with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):
            y = layer(x)
        y.float().square().sum().backward()
        assert y.is_cuda and y.device.type == "cuda" and x.grad.is_cuda
        assert layer.weight.grad.abs().sum() > 0
        exact = layer(x)
        assert 0 < (y - exact).norm() < 0.1 * exact.norm()

    def test_autocast():
        layer = te.Linear(32, 32, params_dtype=torch.float32, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert layer(torch.randn(16, 32, device="cuda")).dtype == torch.bfloat16

    def test_model_parallel_seed():
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            first = torch.rand(4, device="cuda")
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            assert torch.equal(first, torch.rand(4, device="cuda"))

    def test_that_fails():
        assert not torch.ones(1, device="cuda").is_cuda
"""


def test_pytest_of_transformer_engine_and_megatron_programs(tmp_path: Path) -> None:
    program(tmp_path, GPU_TESTS, "test_gpu.py")
    output = check(run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_gpu.py", cwd=tmp_path), 1)
    assert "1 failed, 4 passed" in output
