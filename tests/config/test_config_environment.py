"""Environment variables in a config: their form, when they are set, and which one a layout misses on which GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_samples import VOCAB_SIZE, load_small, write
from little_data import write_token_file

from megatron_fp8.config.check import check_config
from megatron_fp8.config.environment import CONNECTIONS, overruled, unmet_needs, variables
from megatron_fp8.config.environment import ENVIRONMENT as KEY
from megatron_fp8.config.schema import ParallelConfig
from megatron_fp8.device import Device
from megatron_fp8.train.job import warn_of_unmet_needs
from tests.e2e.launch import pretrain

HOPPER, BLACKWELL = (9, 0), (10, 0)
# Says what torch will find, and ends there.
LOOK_AT_TORCH = """\
import os, sys
class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            names = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_DEBUG", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
            print(*(os.environ.get(name) for name in names), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Look())
"""


def problems_of(directory: Path, *settings: str) -> list[str]:
    loaded = load_small(directory, [f"{KEY}=[{','.join(settings)}]"])
    return [str(problem) for problem in check_config(loaded, 4, VOCAB_SIZE)]


@pytest.mark.parametrize(
    "setting", [f"{CONNECTIONS}=1", "NCCL_IB_HCA=mlx5_0:1", "PYTORCH_CUDA_ALLOC_CONF=a:b", "NVTE_DEBUG=1"]
)
def test_variables_of_the_libraries_underneath_are_taken(tmp_path: Path, setting: str) -> None:
    assert problems_of(tmp_path, setting) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["NCCL_DEBUG"], "NAME=value"),
        (["=1"], "NAME=value"),
        (["NCCL_DEBUG="], "NAME=value"),
        (["LD_PRELOAD=/tmp/evil.so"], "is not a CUDA, NCCL, torch or Transformer Engine variable"),
        (["PYTHONPATH=/tmp"], "is not a CUDA, NCCL, torch or Transformer Engine variable"),
        (["RANK=3"], "is not a CUDA, NCCL, torch or Transformer Engine variable"),
        (["nccl_debug=INFO"], "is not a CUDA, NCCL, torch or Transformer Engine variable"),
        (["CUDA_VISIBLE_DEVICES=0"], "the launcher's environment"),
        ([f"{CONNECTIONS}=many"], "is not a number of connections"),
        ([f"{CONNECTIONS}=0"], "is not a number of connections"),
        (["NCCL_DEBUG=WARN", "NCCL_DEBUG=INFO"], "NCCL_DEBUG has 2 different values"),
    ],
)
def test_others_are_refused_with_the_reason(tmp_path: Path, settings: list[str], said: str) -> None:
    problems = problems_of(tmp_path, *settings)
    assert len(problems) == 1
    assert problems[0].startswith(KEY)
    assert said in problems[0]


def test_a_secret_is_refused_and_not_repeated(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, "NCCL_API_KEY=hunter2")
    assert "dashboards" in problem
    assert "hunter2" not in problem


@pytest.mark.parametrize(
    ("tensor_parallel", "capability", "value", "warned"),
    [
        (2, HOPPER, None, True),
        (2, HOPPER, "8", True),
        (2, HOPPER, "1", False),
        (1, HOPPER, None, False),
        (2, BLACKWELL, None, False),
        (2, (8, 0), None, True),
    ],
)
def test_tensor_parallel_layouts_need_one_connection_before_blackwell(
    tensor_parallel: int, capability: tuple[int, int], value: str | None, warned: bool
) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=tensor_parallel)
    environ = {} if value is None else {CONNECTIONS: value}
    problems = unmet_needs(parallel, environ, capability)
    assert bool(problems) == warned
    for problem in problems:
        assert problem.key == KEY
        assert f"{CONNECTIONS}=1" in problem.use_instead


class FakeGpu(Device):
    """An H100 as far as a warning needs one."""

    def compute_capability(self) -> tuple[int, int]:
        return HOPPER


@pytest.mark.parametrize(("emulated", "rank", "warned"), [(False, 0, True), (False, 1, False), (True, 0, False)])
def test_one_rank_of_a_job_on_gpus_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], emulated: bool, rank: int, warned: bool
) -> None:
    config = load_small(tmp_path, ["parallel.tensor_model_parallel_size=2"]).config
    device = FakeGpu(torch_device=None, emulated=emulated, collective_backend="nccl", description="")  # type: ignore[arg-type]
    warn_of_unmet_needs(config, device, {}, rank)
    assert (f"{CONNECTIONS}=1" in capsys.readouterr().err) == warned


def test_the_job_s_own_environment_comes_first_and_is_told() -> None:
    parallel = ParallelConfig(environment=[f"{CONNECTIONS}=1", "NCCL_DEBUG=WARN"])
    assert overruled(parallel, {CONNECTIONS: "1", "PATH": "/bin"}) == []
    (problem,) = overruled(parallel, {CONNECTIONS: "8"})
    assert f"unset {CONNECTIONS}" in problem.use_instead
    assert variables(parallel.environment) == {CONNECTIONS: "1", "NCCL_DEBUG": "WARN"}


def test_a_run_sets_them_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LOOK_AT_TORCH, encoding="utf-8")
    write_token_file(tmp_path / "data" / "train", 200)
    write_token_file(tmp_path / "data" / "valid", 200)
    data = ["data.tokenizer_type=ByteLevelTokenizer", "data.tokenizer_model=null"]
    settings = f"{KEY}=[{CONNECTIONS}=1,NCCL_DEBUG=WARN]"
    environment = {"PYTHONPATH": str(tmp_path), "NCCL_DEBUG": "INFO"}
    ended = pretrain(
        write(tmp_path), settings, "training.deterministic_mode=true", *data, cwd=tmp_path, environment=environment
    )
    assert ended.code == 0, ended.output
    assert ended.stdout == "1 INFO 0\n"
    assert "NCCL_DEBUG=INFO, which takes precedence" in ended.stderr
