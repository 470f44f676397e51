"""The programs of docs/api.md, taken out of the page, run with nothing installed but the base."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp8.extras import MODULES

ROOT = Path(__file__).resolve().parents[2]
OWN_LOOP, FOR_GPUS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.S)
# The base installs these too, for onnxscript and torch.
OF_THE_BASE = ("google", "jinja2")


@pytest.fixture
def only_the_base(tmp_path: Path) -> dict[str, str]:
    """An environment in which the modules of the extras are missing."""
    for module in {module for modules in MODULES.values() for module in modules} - set(OF_THE_BASE):
        missing = tmp_path / "missing" / module / "__init__.py"
        missing.parent.mkdir(parents=True)
        missing.write_text(f"raise ModuleNotFoundError(name={module!r})\n", encoding="utf-8")
    # What the stand-in has set in this process.
    ours = ("NVTE_PROJECT_BUILDING", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    return {**environment, "PYTHONPATH": f"{tmp_path / 'missing'}:{ROOT}", "OMP_NUM_THREADS": "1"}


def run(cwd: Path, environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_loop_of_one_s_own_trains_evaluates_and_resumes(tmp_path: Path, only_the_base: dict[str, str]) -> None:
    (tmp_path / "own_loop.py").write_text(OWN_LOOP, encoding="utf-8")
    first, second = run(tmp_path, only_the_base, "own_loop.py").splitlines()
    assert re.fullmatch(r"loss \d\.\d{6}", first)
    assert second == f"{first} after loading, []"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="with GPUs torchrun alone runs it")
def test_a_program_for_gpus_runs_on_two_ranks(tmp_path: Path, only_the_base: dict[str, str]) -> None:
    (tmp_path / "for_gpus.py").write_text(FOR_GPUS, encoding="utf-8")
    launcher = ("-m", "megatron_fp8.cpu", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    (line,) = run(tmp_path, only_the_base, *launcher, "for_gpus.py").splitlines()
    assert re.fullmatch(r"2 ranks on NVIDIA H100 \(CPU stand-in\), loss \d\.\d{4}", line)


def test_the_page_shows_the_commands_that_are_run() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert "`python -m megatron_fp8.cpu -m torch.distributed.run --standalone --nproc-per-node 2 for_gpus.py`" in text
