"""The environment variables of a run: those a config gives, those its layout needs, those of deterministic mode.

A config carries them (`parallel.environment`), so that a run does not depend on what its launcher exports. The
environment itself is an argument: it is read in `config/load.py` and written in `parallel/process_environment.py`.

The variables of `training.deterministic_mode` and their values are those of Megatron Core's `training/determinism.py`,
which a test compares. Its `Ring` is the NCCL algorithm whose order of sums depends on the ranks alone; with `Tree` NCCL
chooses the order within a node. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_fp8.config.facts import Facts, Finding
from megatron_fp8.config.fields import config_fields
from megatron_fp8.config.problem import HIDDEN, Problem, hide, secret_values
from megatron_fp8.config.schema import Config, ParallelConfig

ENVIRONMENT, DETERMINISTIC = "parallel.environment", "training.deterministic_mode"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# Whose variables they are: CUDA's, its libraries', torch's, Transformer Engine's, and those of networks under NCCL.
_LIBRARY_VARIABLE = re.compile(r"(CUDA|CUBLAS|CUDNN|NCCL|TORCH|PYTORCH|NVTE|UCX|FI|GLOO)_[A-Z0-9_]+")
# Theirs by name, but each rank's or the launcher's to set.
_OF_THE_LAUNCHER = frozenset({"CUDA_VISIBLE_DEVICES"})
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL")
# Blackwell; from there on Transformer Engine's and NCCL's kernels need no order of launches.
_CAPABILITY_WITHOUT_NEED = 10


@dataclass(frozen=True)
class Need:
    """A variable that a layout needs, its value, and what happens without it."""

    name: str
    value: str
    why: str


def variables(settings: Sequence[str]) -> dict[str, str]:
    """`NAME=value` texts as names and values; of a name that comes twice, the last. The rules have accepted them."""
    return {name: value for name, _, value in (setting.partition("=") for setting in settings)}


def check_environment(facts: Facts) -> Iterator[Finding]:
    """Every entry that is no variable of the libraries underneath, or that says what another one says differently."""
    settings = facts.config.parallel.environment
    for setting in settings:
        name, equals, value = setting.partition("=")
        reason, use = _mistake(name, equals, value)
        if reason:
            # The value may be a secret that was put here by mistake.
            yield Finding(f"variable {name}", ENVIRONMENT, reason, (), use, value=name if equals else setting)
    for name in dict.fromkeys(setting.partition("=")[0] for setting in settings):
        values = {setting.partition("=")[2] for setting in settings if setting.partition("=")[0] == name}
        if len(values) > 1:
            reason = f"{name} has {len(values)} different values"
            yield Finding(f"twice {name}", ENVIRONMENT, reason, (), "one of them", value=name)


def _mistake(name: str, equals: str, value: str) -> tuple[str, str]:
    """(what is wrong with an entry, or nothing; what to use)."""
    if not equals or not name or not value:
        return "an entry must be NAME=value", f"for example {CONNECTIONS}=1"
    if name in _OF_THE_LAUNCHER:
        return f"{name} is set per machine", "the launcher's environment"
    if _SECRET.search(name):
        return "the config is written to the run directory and to dashboards", "the launcher's environment for secrets"
    if not _LIBRARY_VARIABLE.fullmatch(name):
        use = "the launcher's environment"
        return f"{name} is not a CUDA, NCCL, torch or Transformer Engine variable", use
    if name == CONNECTIONS and not (value.isdecimal() and 1 <= int(value) <= 32):
        return f"{value} is not a number of connections from 1 to 32", f"{CONNECTIONS}=1"
    return "", ""


def needs(parallel: ParallelConfig, compute_capability: tuple[int, int]) -> Iterator[Need]:
    """The variables that a layout needs on GPUs of a compute capability."""
    if parallel.tensor_model_parallel_size > 1 and compute_capability[0] < _CAPABILITY_WITHOUT_NEED:
        yield Need(
            CONNECTIONS,
            "1",
            "tensor-parallel collectives overlap with GEMMs only if the GPU starts kernels in launch order; with more "
            "connections a GEMM may start first, and the collective waits for it in every layer",
        )


def unmet_needs(
    parallel: ParallelConfig, environ: Mapping[str, str], compute_capability: tuple[int, int], origin: str = ""
) -> list[Problem]:
    """What a layout needs on these GPUs and does not have in the environment that a rank runs in; none is fatal."""
    return [
        Problem(
            ENVIRONMENT,
            f"{need.name}={environ[need.name]}" if need.name in environ else f"(without {need.name})",
            f"parallel.tensor_model_parallel_size={parallel.tensor_model_parallel_size}: {need.why}",
            f"{need.name}={need.value} in {ENVIRONMENT}, or in the environment of the job, which takes precedence",
            origin,
        )
        for need in needs(parallel, compute_capability)
        if environ.get(need.name) != need.value
    ]


def overruled(parallel: ParallelConfig, environ: Mapping[str, str], origin: str = "") -> list[Problem]:
    """Variables that the job's environment sets to something else than the config; the job's stay."""
    return [
        Problem(
            ENVIRONMENT,
            f"{name}={value}",
            f"the job's environment has {name}={environ[name]}, which takes precedence",
            f"`unset {name}` to use the config's value, or set {name}={environ[name]} in the config",
            origin,
        )
        for name, value in variables(parallel.environment).items()
        if environ.get(name, value) != value
    ]


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
        f"    why: {launcher} started several tasks, and each would train separately into the same run\n"
        f"    use: {one_a_node} torchrun --nnodes {num_nodes} --nproc-per-node GPUS --rdzv-id NAME "
        "--rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 pretrain.py CONFIG; for one process, a single task",
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    """-1 for anything but a number."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else -1


def secret_problems(config: Config, environ: Mapping[str, str], origins: Mapping[str, str]) -> list[Problem]:
    """The mistake of each key whose text holds a secret: a password in an address, a key, one of the environment."""
    secrets = secret_values(environ)
    return [
        Problem(
            key,
            hide(text, secrets),
            f"contains a secret (shown as {HIDDEN}), and the config is written to the run directory and to dashboards",
            "an address without a password; keep the secret in the environment or in the service's credentials file",
            origins.get(key, ""),
        )
        for key, text in _texts(config)
        if hide(text, secrets) != text
    ]


def _texts(config: Config) -> Iterator[tuple[str, str]]:
    for key, spec in config_fields().items():
        value = getattr(getattr(config, spec.section), spec.name)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                yield key, text


@dataclass(frozen=True)
class Switch:
    """A variable that a library reads when it starts. `value`: what is set; `serve`: all values that do.

    `is_list`: of several values, with commas between them, each must serve.
    """

    name: str
    value: str
    serve: tuple[str, ...]
    whose: str
    is_list: bool = False

    def serves(self, value: str) -> bool:
        """Whether the library is deterministic with it."""
        values = [each.strip() for each in value.split(",") if each.strip()] if self.is_list else [value]
        return bool(values) and all(each in self.serve for each in values)


SWITCHES = (
    Switch("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", ("0",), "attention's backward pass in Transformer Engine"),
    Switch("CUBLAS_WORKSPACE_CONFIG", ":4096:8", (":4096:8", ":16:8"), "matrix products of cuBLAS"),
    Switch("NCCL_ALGO", "Ring", ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"), "sums over ranks in NCCL", True),
)


def run_variables(config: Config) -> dict[str, str]:
    """All variables that a rank of a run sets where the job's environment does not: of the layout and of this key."""
    own = {switch.name: switch.value for switch in SWITCHES} if config.training.deterministic_mode else {}
    return {**own, **variables(config.parallel.environment)}


def check_determinism(facts: Facts) -> Iterator[Finding]:
    """Variables in the config that undo the key."""
    if not facts.config.training.deterministic_mode:
        return
    for switch, value in _undoing(variables(facts.config.parallel.environment)):
        yield Finding(f"undone by {switch.name}", ENVIRONMENT, _reason(switch, value), (), _use(switch), switch.name)


def undone_by_job(config: Config, environ: Mapping[str, str], origin: str = "") -> list[Problem]:
    """Variables of the job's environment, which comes first, that undo the key."""
    if not config.training.deterministic_mode:
        return []
    return [
        Problem(
            DETERMINISTIC, True, f"the job's environment: {_reason(switch, value)}", f"`unset {switch.name}`", origin
        )
        for switch, value in _undoing(environ)
    ]


def _undoing(values: Mapping[str, str]) -> Iterator[tuple[Switch, str]]:
    for switch in SWITCHES:
        if switch.name in values and not switch.serves(values[switch.name]):
            yield switch, values[switch.name]


def _reason(switch: Switch, value: str) -> str:
    return f"{switch.name}={value} lets {switch.whose} add in any order, which {DETERMINISTIC}=true rules out"


def _use(switch: Switch) -> str:
    return f"{switch.name}={' or '.join(switch.serve)}, or leave it out"
