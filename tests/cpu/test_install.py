"""When and how the stand-in goes in. Each case needs a process in which nothing was imported yet."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(text: str) -> str:
    """The output of a fresh Python that runs `text`; AssertionError with its traceback when it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_install_is_silent_idempotent_and_says_what_it_is() -> None:
    output = python("""
        import megatron_fp8.cpu as cpu
        assert not cpu.installed() and cpu.describe().startswith("CUDA")
        assert cpu.install() is True
        import torch
        zeros = torch.zeros
        assert cpu.install() is True and torch.zeros is zeros and cpu.installed()
        line = cpu.describe()
        assert "\\n" not in line and "CPU stand-in" in line and "TE 2." in line

        import transformer_engine.pytorch as te
        import megatron.core.optimizer, megatron.core.pipeline_parallel, megatron.core.distributed
        from megatron.core.extensions.transformer_engine import HAVE_TE
        assert HAVE_TE and torch.cuda.get_device_capability() == (9, 0)
        import transformer_engine_torch
        try:
            transformer_engine_torch.no_such_kernel(1)
        except NotImplementedError as error:
            assert "no_such_kernel" in str(error)
        else:
            raise AssertionError("an unknown kernel returned something")
    """)
    assert output == ""


def test_nothing_is_patched_where_cuda_is_unless_forced() -> None:
    python("""
        import sys
        import torch
        torch.cuda.is_available = lambda: True
        before = {name: getattr(torch, name) for name in dir(torch)}
        from megatron_fp8.cpu import describe, install, installed
        assert install() is False and not installed() and describe().startswith("CUDA")
        assert all(getattr(torch, name) is value for name, value in before.items())
        assert "transformer_engine_torch" not in sys.modules and "triton" not in sys.modules
        assert install(force=True) is True and installed()
        assert torch.zeros(1, device="cuda").device.type == "cuda"
    """)


def test_too_late_is_an_error_that_says_when() -> None:
    python("""
        import warnings
        warnings.simplefilter("ignore")
        import os
        os.environ["NVTE_PROJECT_BUILDING"] = "1"
        try:
            import transformer_engine
        except ImportError:
            pass
        import sys, types
        sys.modules.setdefault("transformer_engine", types.ModuleType("transformer_engine"))
        import torch
        zeros = torch.zeros
        from megatron_fp8.cpu import install
        try:
            install()
        except RuntimeError as error:
            assert "transformer_engine was imported" in str(error), error
            assert "before the first import" in str(error), error
        else:
            raise AssertionError("install() after Transformer Engine must not succeed")
        assert torch.zeros is zeros
    """)


def test_triton_kernels_refuse_by_name() -> None:
    python("""
        from megatron_fp8.cpu import install
        install()
        import triton, triton.language as tl
        from triton.language.standard import _log2

        @triton.autotune(configs=[triton.Config({"BLOCK": 2}, num_warps=1)], key=["n"])
        @triton.jit
        def my_kernel(pointer, n: tl.constexpr):
            tl.load(pointer)

        for call in (lambda: my_kernel[(1,)](0, 1), lambda: triton.cdiv(3, 2), lambda: tl.load(0)):
            try:
                call()
            except NotImplementedError as error:
                assert "my_kernel" in str(error) or "triton.cdiv" in str(error) or ".load" in str(error)
            else:
                raise AssertionError("a Triton call returned something")

        import torch
        import transformer_engine.pytorch as te
        from torch.utils._triton import has_triton_package
        assert not has_triton_package()
        try:
            logits = torch.randn(2, 1, 8, device="cuda", requires_grad=True)
            te.parallel_cross_entropy(logits, torch.zeros(2, 1, dtype=torch.long, device="cuda"))
        except NotImplementedError as error:
            assert "Triton" in str(error) or "triton" in str(error), error
        else:
            raise AssertionError("a Triton kernel ran")
    """)
