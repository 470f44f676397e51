"""`training.deterministic_mode`: what it sets where, and what would undo it."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_samples import VOCAB_SIZE, load_small

from megatron_fp8.config.check import check_config
from megatron_fp8.config.environment import DETERMINISTIC as KEY
from megatron_fp8.config.environment import SWITCHES, run_variables, undone_by_job
from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.load import dump_config
from megatron_fp8.config.problem import Problem
from megatron_fp8.config.resume_check import compare_with_saved
from megatron_fp8.planner.gpus import DEFAULT_GPU, GPUS
from megatron_fp8.planner.plan import make_plan
from megatron_fp8.planner.plan_report import plan_json, plan_text

ON = f"{KEY}=true"


def problems_of(directory: Path, *overrides: str) -> list[Problem]:
    return check_config(load_small(directory, overrides), 4, VOCAB_SIZE)


def test_the_variables_and_what_serves_are_megatrons() -> None:
    """Of the version whose module has them; the fallback's demands are the same but for the ring."""
    determinism = pytest.importorskip("megatron.training.determinism")
    assert {switch.name: switch.value for switch in SWITCHES} == determinism.DETERMINISM_ENV_VAR_DEFAULTS
    for switch in SWITCHES:
        if switch.is_list:
            assert set(switch.serve) == determinism.ACCEPTED_NCCL_ALGO_TOKENS
        else:
            assert set(switch.serve) == determinism.ACCEPTED_ENV_VAR_VALUES[switch.name]
    # What Megatron refuses beside these is no key here: neither its fused cross entropy nor overlapping by userbuffers.
    assert set(determinism.ARG_VALUES_REQUIRED_FOR_DETERMINISM) == {"cross_entropy_loss_fusion", "tp_comm_overlap"}


def test_without_the_key_nothing_is_set(tmp_path: Path) -> None:
    loaded = load_small(tmp_path)
    assert run_variables(loaded.config) == {}
    assert undone_by_job(loaded.config, {"NCCL_ALGO": "Tree"}) == []
    assert problems_of(tmp_path, "parallel.environment=[NCCL_ALGO=Tree]") == []


def test_with_it_the_libraries_are_told_and_the_configs_own_choice_stays(tmp_path: Path) -> None:
    loaded = load_small(tmp_path, [ON, "parallel.environment=[NCCL_ALGO=CollnetDirect,NCCL_DEBUG=WARN]"])
    set_here = run_variables(loaded.config)
    assert set_here == {
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "CollnetDirect",
        "NCCL_DEBUG": "WARN",
    }
    assert problems_of(tmp_path, ON, "parallel.environment=[NCCL_ALGO=CollnetDirect]") == []


@pytest.mark.parametrize(
    "setting", ["NCCL_ALGO=Tree", "NCCL_ALGO=Ring,Tree", "NVTE_ALLOW_NONDETERMINISTIC_ALGO=1",
                "CUBLAS_WORKSPACE_CONFIG=:0:0"]
)  # fmt: skip
def test_what_undoes_it_is_refused_in_the_config_and_in_the_jobs_environment(tmp_path: Path, setting: str) -> None:
    name, _, value = setting.partition("=")
    # A comma divides entries of a list.
    if "," not in setting:
        (problem,) = problems_of(tmp_path, ON, f"parallel.environment=[{setting}]")
        assert problem.key == "parallel.environment"
        assert f"{setting} lets" in problem.reason
        assert f"{name}=" in problem.use_instead
    config = load_small(tmp_path, [ON]).config
    (problem,) = undone_by_job(config, {name: value})
    assert (problem.key, problem.use_instead) == (KEY, f"`unset {name}`")
    assert undone_by_job(config, {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}) == []


def test_a_resume_that_changes_it_is_told(tmp_path: Path) -> None:
    saved = dump_config(load_small(tmp_path, [ON]).config)
    assert compare_with_saved(load_small(tmp_path).config, saved) == ([], [f"{KEY} is false, was true"])


LONG = ("model.seq_length=16384", "data.reset_attention_mask=true")


@pytest.mark.parametrize(
    ("gpu", "overrides", "said", "unsaid"),
    [
        (DEFAULT_GPU, (ON,), "NCCL's ring algorithm only", "unfused"),
        (DEFAULT_GPU, (), "", "deterministic"),
        (DEFAULT_GPU, (ON, *LONG), "masking between documents would not fit", "on the H100"),
        (DEFAULT_GPU, (ON, LONG[0]), "not measured", "unfused"),
        ("b200-180g", (ON, *LONG), "not measured", "unfused"),
        ("a100-40g", (ON,), "no deterministic backward pass for attention on the A100 SXM 40 GB", "does not fit"),
        ("a100-40g", (ON, "precision.mode=fp32"), "not measured", "flash-attn"),
        ("cpu", (ON,), "every CPU run is", "NCCL"),
    ],
)
def test_a_plan_says_what_it_changes(
    tmp_path: Path, gpu: str, overrides: tuple[str, ...], said: str, unsaid: str
) -> None:
    config = load_small(tmp_path, ["precision.mode=bf16", *overrides]).config
    plan = make_plan(config, derive_layout(config, 4, VOCAB_SIZE), GPUS[gpu])
    text = " ".join(plan_text(plan).split())
    assert said in text
    assert unsaid not in text
    assert bool(plan_json(plan)["deterministic"]) == (ON in overrides)
