"""Keeps the tasks of a scheduler or of MPI from each training as a single-rank job.

torchrun tells each rank its number in environment variables. `srun` and `mpirun` use others; a program that ignores
those trains once per task, and every task writes the same run. The
environment is an argument. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# The launcher, and its variables for a task's number and for the number of tasks. `srun` sets the last one for
# the tasks of a step; SLURM_NTASKS alone is what a batch script was given, which runs once.
_LAUNCHERS = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
)
# These give the task's number alone.
_NUMBERS = (("srun", "SLURM_PROCID", "SLURM_NTASKS"), ("mpirun", "PMIX_RANK", ""))
_OF_TORCHRUN = ("RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class ForeignTasks:
    """Tasks of a launcher other than torchrun: this one's number, and the error message."""

    rank: int
    text: str


def foreign_tasks(environ: Mapping[str, str]) -> ForeignTasks | None:
    """The tasks that this process is one of, if a launcher other than torchrun started several."""
    if all(name in environ for name in _OF_TORCHRUN):
        return None
    for launcher, rank, size in _LAUNCHERS:
        if _number(environ, size) > 1:
            return _found(environ, launcher, rank, size)
    for launcher, rank, size in _NUMBERS:
        if _number(environ, rank) > 0:
            return _found(environ, launcher, rank, size)
    return None


def _found(environ: Mapping[str, str], launcher: str, rank: str, size: str) -> ForeignTasks:
    shown = " and ".join(f"{name}={environ[name]}" for name in (rank, size) if name in environ)
    if launcher == "srun":
        one_a_node, num_nodes = "srun --ntasks-per-node 1", "$SLURM_NNODES"
    else:
        one_a_node, num_nodes = "mpirun, one process a node:", "NODES"
    return ForeignTasks(
        max(_number(environ, rank), 0),
        f"{shown} in the environment, without {' and '.join(_OF_TORCHRUN)}\n"
        f"    why: {launcher} started several tasks, and each would train on its own, into the same run\n"
        f"    use: {one_a_node} torchrun --nnodes {num_nodes} --nproc-per-node GPUS --rdzv-id NAME "
        "--rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 pretrain.py CONFIG; for one process, a single task",
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    """-1 for anything but a number."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else -1
