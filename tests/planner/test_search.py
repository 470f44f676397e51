"""The search: what it proposes passes the project's own check, fits, and is ranked by what differs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fp8.commands.plan import main
from megatron_fp8.commands.train_options import summarize
from megatron_fp8.config.check import check_config
from megatron_fp8.config.layout import derive_layout
from megatron_fp8.config.load import load_config
from megatron_fp8.planner.flops import UnknownPeakError, flops_per_token, fp8_gain, run_duration
from megatron_fp8.planner.gpus import GPUS
from megatron_fp8.planner.memory import stage_memories
from megatron_fp8.planner.search import DISTRIBUTED, PP, RECOMPUTE, TP, SearchResult, search, with_values
from tests.command_line import exit_code
from tests.planner.published import LLAMA3_8B, LLAMA3_70B, config_of

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "llama_1b_fp8.yaml")
H100 = GPUS["h100-80g"]


def overrides_of(model: dict[str, Any], *more: str) -> list[str]:
    return [*(f"model.{key}={value}" for key, value in model.items()), *more]


def search_for(model: dict[str, Any], world_size: int, *more: str, gpu: str = "h100-80g") -> SearchResult:
    return search(load_config(CONFIG, overrides_of(model, *more)), world_size, None, GPUS[gpu])


SMALL = {"num_layers": 8, "seq_length": 4096, "vocab_size": 32000}


def test_every_proposal_passes_the_check_as_it_is_typed() -> None:
    result = search_for(SMALL, 8)
    loaded = load_config(CONFIG, overrides_of(SMALL))
    assert len(result.fitting) > 50
    for proposal in result.fitting[::5]:
        typed = proposal.overrides(loaded.config).split()
        again = load_config(CONFIG, [*overrides_of(SMALL), *typed])
        assert check_config(again, 8, None) == []
        layout = derive_layout(again.config, 8, None)
        assert layout == proposal.layout
        assert max(memory.total for memory in stage_memories(again.config, layout, H100)) == proposal.fullest.total
        assert proposal.fullest.total <= result.usable_bytes


def test_layouts_are_ranked() -> None:
    result = search_for(SMALL, 8)
    seconds = [proposal.seconds.total for proposal in result.fitting if proposal.seconds is not None]
    assert len(seconds) == len(result.fitting)
    assert seconds == sorted(seconds)
    # A model that fits on every GPU is neither divided nor recomputed, nor are its layers spread over machines.
    best = result.fitting[0].values
    assert (best[TP], best[PP], best[RECOMPUTE], best[DISTRIBUTED]) == (1, 1, "none", True)


def test_a_large_model_is_divided() -> None:
    result = search_for(LLAMA3_70B, 64, "training.global_batch_size=64")
    best = result.fitting[0]
    assert best.values[TP] * best.values[PP] >= 8
    assert result.num_valid > len(result.fitting)


@pytest.mark.parametrize("model", [LLAMA3_70B | {"num_layers": 79, "hidden_size": 8200}, LLAMA3_70B])
def test_it_says_why_nothing_fits(model: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, CONFIG, "--search", "8", *overrides_of(model, "training.global_batch_size=8")) == 1
    answer = capsys.readouterr().out
    assert "0 fit into" in answer
    if model is LLAMA3_70B:
        assert "No layout fits. The smallest takes" in answer
        assert "too much; most of it is" in answer
    else:
        assert "No layout passes the rules" in answer
        assert "model.hidden_size=8200" in answer


def test_a_gpu_that_lacks_the_format_is_refused() -> None:
    with pytest.raises(UnknownPeakError, match="no FP8 tensor cores"):
        search_for(SMALL, 8, gpu="a100-80g")
    with pytest.raises(UnknownPeakError, match="emulates"):
        search_for(SMALL, 8, gpu="cpu")


def test_days_and_gpu_hours() -> None:
    config = config_of(LLAMA3_8B)
    layout = derive_layout(config, 1024, None)
    flops = flops_per_token(config, layout)
    spent = run_duration(config, layout, flops, H100, 15e12, mfu=0.4)
    expected = 15e12 * flops.model / (1024 * 0.4 * 989.4e12)
    assert spent.days == pytest.approx(expected / 86400)
    assert spent.gpu_hours == pytest.approx(expected / 3600 * 1024)
    # Meta's model card: 1.3 million H100 hours for 15 trillion tokens, restarts and all.
    assert 0.4e6 < spent.gpu_hours < 1.3e6
    assert run_duration(config, layout, flops, GPUS["cpu"], 15e12).withheld is not None


def test_a_peak_that_does_not_exist_is_withheld() -> None:
    config = config_of(LLAMA3_8B, precision={"mode": "fp8"})
    layout = derive_layout(config, 1024, None)
    spent = run_duration(config, layout, flops_per_token(config, layout), GPUS["a100-80g"], 1e12)
    assert spent.days is None
    assert spent.withheld == "the A100 has no FP8 tensor cores"


@pytest.mark.parametrize("tokens", [64, 512, 4096])
def test_fp8_pays_from_a_number_of_tokens(tokens: int) -> None:
    loaded = load_config(CONFIG, overrides_of(SMALL | {"seq_length": tokens}, "training.micro_batch_size=1"))
    gain = fp8_gain(derive_layout(loaded.config, 2, None))
    assert gain.pays_from_tokens is not None
    assert (gain.saved_us >= gain.spent_us) == (tokens >= gain.pays_from_tokens)
    narrow = load_config(CONFIG, ["model.hidden_size=256", "model.ffn_hidden_size=512", "model.vocab_size=1000"])
    assert fp8_gain(derive_layout(narrow.config, 2, None)).pays_from_tokens is None


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "tools.plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_the_tool_plans_without_torch() -> None:
    ended = run_tool(CONFIG, "--world-size", "8", "--tokens", "1e12", "--mfu", "0.5", "--json", *overrides_of(SMALL))
    assert ended.returncode == 0, ended.stderr
    assert "| torch" not in ended.stderr
    plan = json.loads(ended.stdout)
    config = load_config(CONFIG, overrides_of(SMALL)).config
    layout = derive_layout(config, 8, None)
    assert plan["parameters"]["total"] == layout.num_parameters
    assert f"{layout.num_parameters:,}" in summarize(config, layout)
    assert plan["memory_bytes"][0]["total"] == stage_memories(config, layout, H100)[0].total
    assert plan["duration"]["num_tokens"] == 1e12
    assert plan["duration"]["mfu"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--mfu", "40"], "share of the peak"),
        (["--tokens", "-1"], "above 0"),
        (["--search", "8", "--world-size", "8"], "leave --world-size out"),
        (["--world-size", "7", "model.vocab_size=32000"], "not divisible by the ranks of one model replica"),
        (["--gpu", "a100-80g", "--search", "8", "model.vocab_size=32000"], "no FP8 tensor cores"),
    ],
)
def test_the_tool_names_mistakes(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, CONFIG, *arguments) == 2
    assert text in capsys.readouterr().err


def test_other_keys_stay_as_they_are() -> None:
    loaded = load_config(CONFIG, overrides_of(SMALL))
    changed = with_values(loaded, 8, {TP: 4}).config
    assert changed.parallel.tensor_model_parallel_size == 4
    assert changed.model == loaded.config.model
