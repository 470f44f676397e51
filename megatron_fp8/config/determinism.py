"""Owns what `training.deterministic_mode` asks of the libraries' environment: variables, and values that would undo it.

The variables and the values that serve are those of Megatron Core's `training/determinism.py`, which a test compares.
Its `Ring` is the choice among NCCL's algorithms whose order of sums depends on the ranks alone; `Tree` is none, since
the order inside a node is NCCL's to choose. What the key switches besides is in `train/setup.py` (torch) and
`model/megatron_config.py` (Megatron). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_fp8.config.environment import KEY as ENVIRONMENT
from megatron_fp8.config.environment import variables
from megatron_fp8.config.facts import Facts, Finding
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import Config

KEY = "training.deterministic_mode"


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
        Problem(KEY, True, f"the job's environment: {_reason(switch, value)}", f"`unset {switch.name}`", origin)
        for switch, value in _undoing(environ)
    ]


def _undoing(values: Mapping[str, str]) -> Iterator[tuple[Switch, str]]:
    for switch in SWITCHES:
        if switch.name in values and not switch.serves(values[switch.name]):
            yield switch, values[switch.name]


def _reason(switch: Switch, value: str) -> str:
    return f"{switch.name}={value} lets {switch.whose} add in any order, which {KEY}=true rules out"


def _use(switch: Switch) -> str:
    return f"{switch.name}={' or '.join(switch.serve)}, or leave it out"
