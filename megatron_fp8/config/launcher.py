"""Owns that several tasks of a scheduler or of MPI are not taken for as many jobs of one rank.

Ranks are started by torchrun, which says in the environment who each of them is. `srun` and `mpirun` have names of
their own for that; a program that does not know them trains once in every task, and all write the same run. The
environment is an argument. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Who starts tasks, and the variables with a task's number and with how many there are. `srun` sets the last one for
# the tasks of a step; SLURM_NTASKS alone is what a batch script was given, which runs once.
_LAUNCHERS = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
)
# Say which task this is, and not how many there are.
_NUMBERS = (("srun", "SLURM_PROCID", "SLURM_NTASKS"), ("mpirun", "PMIX_RANK", ""))
_OF_TORCHRUN = ("RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class ForeignTasks:
    """Tasks of a launcher that is not torchrun: the number of this one, and what to say of them."""

    rank: int
    text: str


def foreign_tasks(environ: Mapping[str, str]) -> ForeignTasks | None:
    """The tasks beside which this process was started without torchrun, if there are any."""
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
        f"    why: {launcher} has started several tasks, and each of them would train by itself, in the same run\n"
        f"    use: {one_a_node} torchrun --nnodes {num_nodes} --nproc-per-node GPUS --rdzv-id NAME "
        "--rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 pretrain.py CONFIG; for one process, a single task",
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    """-1 for what is no number."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else -1
