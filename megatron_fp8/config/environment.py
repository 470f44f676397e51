"""Owns the environment variables of a run: the form in which a config gives them, and which ones a layout needs.

A config carries them (`parallel.environment`), so that a run does not depend on what its launcher exports. The
environment itself is an argument: it is read in `config/load.py` and written in `parallel/environment.py`. Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_fp8.config.facts import Facts, Finding
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import ParallelConfig

KEY = "parallel.environment"
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
            yield Finding(f"variable {name}", KEY, reason, (), use, value=name if equals else setting)
    for name in dict.fromkeys(setting.partition("=")[0] for setting in settings):
        values = {setting.partition("=")[2] for setting in settings if setting.partition("=")[0] == name}
        if len(values) > 1:
            reason = f"{name} is given {len(values)} values"
            yield Finding(f"twice {name}", KEY, reason, (), "one of them", value=name)


def _mistake(name: str, equals: str, value: str) -> tuple[str, str]:
    """(what is wrong with an entry, or nothing; what to use)."""
    if not equals or not name or not value:
        return "an entry is NAME=value", f"{CONNECTIONS}=1, say"
    if name in _OF_THE_LAUNCHER:
        return f"{name} is each machine's own", "the launcher's environment"
    if _SECRET.search(name):
        return "the config is written to the run directory and to dashboards", "the launcher's environment for secrets"
    if not _LIBRARY_VARIABLE.fullmatch(name):
        use = "variables of CUDA, NCCL, torch or Transformer Engine; others in the launcher's environment"
        return f"{name} is none that the libraries under a run read", use
    if name == CONNECTIONS and not (value.isdecimal() and 1 <= int(value) <= 32):
        return f"{value} is no number of connections, which CUDA has 1 to 32 of", f"{CONNECTIONS}=1"
    return "", ""


def needs(parallel: ParallelConfig, compute_capability: tuple[int, int]) -> Iterator[Need]:
    """The variables that a layout needs on GPUs of a compute capability."""
    if parallel.tensor_model_parallel_size > 1 and compute_capability[0] < _CAPABILITY_WITHOUT_NEED:
        yield Need(
            CONNECTIONS,
            "1",
            "tensor-parallel collectives overlap with GEMMs only if the GPU takes kernels in the order of their "
            "launch; with more connections a GEMM may come first, and the collective waits for it in every layer",
        )


def unmet_needs(
    parallel: ParallelConfig, environ: Mapping[str, str], compute_capability: tuple[int, int], origin: str = ""
) -> list[Problem]:
    """What a layout needs on these GPUs and does not have in the environment that a rank runs in; none is fatal."""
    return [
        Problem(
            KEY,
            f"{need.name}={environ[need.name]}" if need.name in environ else f"(without {need.name})",
            f"parallel.tensor_model_parallel_size={parallel.tensor_model_parallel_size}: {need.why}",
            f"{need.name}={need.value} in {KEY}, or in the environment of the job, which comes first",
            origin,
        )
        for need in needs(parallel, compute_capability)
        if environ.get(need.name) != need.value
    ]


def overruled(parallel: ParallelConfig, environ: Mapping[str, str], origin: str = "") -> list[Problem]:
    """Variables that the job's environment sets to something else than the config; the job's stay."""
    return [
        Problem(
            KEY,
            f"{name}={value}",
            f"the job's environment has {name}={environ[name]}, which stays: it knows the machines",
            f"`unset {name}` where the config's value is meant, or {name}={environ[name]} in the config",
            origin,
        )
        for name, value in variables(parallel.environment).items()
        if environ.get(name, value) != value
    ]
