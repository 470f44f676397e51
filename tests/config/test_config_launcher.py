"""Tasks of srun or mpirun without torchrun are refused; torchrun behind them, and a single task, are not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_fp8.config.environment import foreign_tasks
from tests.e2e.launch import pretrain

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "3"}
STEP_OF_TWO = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"}
TASKS = [
    STEP_OF_TWO,
    {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
    {"PMI_SIZE": "4", "PMI_RANK": "3"},
    {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "3"},
    {"PMIX_RANK": "1"},
]


@pytest.mark.parametrize("environ", TASKS)
def test_tasks_without_torchrun_are_found_and_torchrun_behind_them_is_not(environ: Mapping[str, str]) -> None:
    tasks = foreign_tasks(environ)
    assert tasks is not None
    size = [name for name in environ if "SIZE" in name or "STEP_NUM" in name]
    assert all(f"{name}={environ[name]}" in tasks.text for name in size or environ)
    assert "torchrun --nnodes" in tasks.text
    assert str(tasks.rank) in environ.values()
    assert foreign_tasks({**environ, **TORCHRUN}) is None


@pytest.mark.parametrize(
    "environ",
    [
        {},
        # One task of a step in a job that could have more, as `srun --ntasks 1` in an allocation of 8.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_NUM_NODES": "2"},
        # The batch script itself, which runs once whatever number of tasks it asked for.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"PMI_SIZE": "many"},
    ],
)
def test_a_single_task_is_a_job_of_one_rank(environ: Mapping[str, str]) -> None:
    assert foreign_tasks(environ) is None


def test_the_program_refuses_them_before_it_reads_the_config_and_shows_the_line_to_use(tmp_path: Path) -> None:
    ended = pretrain("nowhere.yaml", cwd=tmp_path, environment=STEP_OF_TWO)
    assert ended.code == 2
    assert "SLURM_PROCID=0 and SLURM_STEP_NUM_TASKS=2 in the environment" in ended.stderr
    assert "srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES --nproc-per-node GPUS" in ended.stderr
    assert ended.cpu_seconds < 3, "torch is imported"
    assert not (tmp_path / "runs").exists()
