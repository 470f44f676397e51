"""Benchmarks our training step against a plain-PyTorch loop of the same model, interleaved in one run.

Reports tokens per second, peak memory and startup time of the reference workload (configs/r1.yaml) in each precision,
their ratios, and this machine's GEMM rate at the model's shapes as the ceiling. Results: docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.speed.measurement import MODES, Plan, make_plan

_REFERENCE = Path(__file__).resolve().parent.parent / "configs" / "r1.yaml"
# R1's GEMM shapes, but fewer layers and one micro-batch per step: seconds instead of minutes.
_QUICK = ("model.num_layers=2", "training.global_batch_size=4")
_QUICK_WITH_DP = ("model.num_layers=2", "training.global_batch_size=8")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line to settings; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="config overrides")
    parser.add_argument("--config", type=Path, default=_REFERENCE, help="the workload (default: configs/r1.yaml)")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=list(MODES),
        help="fp32, bf16: against plain PyTorch; fp8: against our bf16; dp: two ranks against one (default: all)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="measured steps per subject (default: 5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of a single-process subject (default: 2)")
    parser.add_argument(
        "--quick", action="store_true", help="2 layers, a smaller batch, 3 rounds: a smoke test, not a result"
    )
    parser.add_argument("--profile", action="store_true", help="also profile one step of each subject")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        metavar="DIRECTORY",
        help="instead measure saving and loading a checkpoint in this directory, against torch.save of the same bytes",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample to FILE")
    parser.add_argument(
        "--slow-step-seconds",
        type=float,
        default=120.0,
        help="a subject with slower steps is measured once, on part of a step (default: 120)",
    )
    parser.add_argument("--start-timeout-seconds", type=float, default=300.0, help="per subject (default: 300)")
    settings = parser.parse_args(arguments)
    for name in ("rounds", "threads"):
        if getattr(settings, name) < 1:
            parser.error(f"--{name} {getattr(settings, name)}: use at least 1")
    if settings.checkpoints is not None and not settings.checkpoints.is_dir():
        parser.error(f"--checkpoints {settings.checkpoints}: no such directory; create it first")
    if settings.json is not None and not settings.json.parent.is_dir():
        parser.error(f"--json {settings.json}: no directory {settings.json.parent}; create it first")
    if settings.quick:
        settings.rounds = min(settings.rounds, 3)
        settings.overrides = [*(_QUICK_WITH_DP if "dp" in settings.modes else _QUICK), *settings.overrides]
    return settings


def run_checkpoints(settings: argparse.Namespace) -> None:
    """Measure and print the cost of checkpoints."""
    from dataclasses import asdict

    from benchmarks.speed.checkpoint_cost import measure_checkpoints
    from benchmarks.speed.report import checkpoint_table
    from rich.console import Console

    from megatron_fp8.config.load import load_config

    config = load_config(settings.config, settings.overrides).config
    with tempfile.TemporaryDirectory(dir=settings.checkpoints) as directory:
        cost = measure_checkpoints(config, Path(directory), settings.rounds)
    Console(width=150).print(checkpoint_table(cost))
    if settings.json is not None:
        settings.json.write_text(json.dumps(asdict(cost), indent=2) + "\n", encoding="utf-8")


def run(settings: argparse.Namespace, plan: Plan) -> None:
    """Measure and print. Raises ConfigError, LayoutError and SubjectError."""
    from benchmarks.speed import report
    from benchmarks.speed.rounds import Procedure, run_rounds
    from rich.console import Console

    from megatron_fp8.config.layout import derive_layout
    from megatron_fp8.config.load import load_config
    from megatron_fp8.planner.flops import step_flops

    config = load_config(settings.config, settings.overrides).config
    ranks = max(subject.num_processes for subject in plan.subjects)
    derive_layout(config, ranks, None)
    layout = derive_layout(config, 1, None)
    procedure = Procedure(
        config=settings.config,
        overrides=tuple(settings.overrides),
        tokens_per_step=layout.tokens_per_global_batch,
        num_rounds=settings.rounds,
        slow_step_seconds=settings.slow_step_seconds,
        start_timeout_seconds=settings.start_timeout_seconds,
        with_profiles=settings.profile,
    )
    results = run_rounds(plan.subjects, procedure, lambda line: print(line, file=sys.stderr, flush=True))
    flops_per_token = step_flops(layout, config.model.num_layers) / layout.tokens_per_global_batch
    report.show(results, plan.comparisons, flops_per_token, Console(width=150))
    if settings.json is not None:
        found = report.as_json(results, plan.comparisons, flops_per_token)
        settings.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: measured; 1: a subject failed; 2: invalid config."""
    settings = parse_arguments(arguments)
    plan = make_plan(settings.modes, settings.threads)
    from benchmarks.speed.rounds import SubjectError

    from megatron_fp8.config.layout import LayoutError
    from megatron_fp8.config.problem import ConfigError

    try:
        if settings.checkpoints is not None:
            run_checkpoints(settings)
        else:
            run(settings, plan)
    except (ConfigError, LayoutError) as error:
        print(error, file=sys.stderr)
        return 2
    except SubjectError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
