"""Measures our training step beside a plain-PyTorch loop of the same model, interleaved in one run.

Tokens per second, peak memory and start-up time of the reference work (configs/r1.yaml) in each precision, the ratios
between them, and this machine's GEMM rate at the model's shapes as the ceiling. What was found: docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.speed.measurement import MODES, Plan, make_plan

_REFERENCE = Path(__file__).resolve().parent.parent / "configs" / "r1.yaml"
# R1's shapes in every GEMM, but fewer layers and one micro-batch a step: minutes become seconds.
_QUICK = ("model.num_layers=2", "training.global_batch_size=4")
_QUICK_WITH_DP = ("model.num_layers=2", "training.global_batch_size=8")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line to settings; a wrong one exits with code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the config")
    parser.add_argument("--config", type=Path, default=_REFERENCE, help="the work (default: configs/r1.yaml)")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=list(MODES),
        help="fp32, bf16: beside plain PyTorch; fp8: beside our bf16; dp: two ranks beside one (default: all)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="steps of each subject (default: 5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of a one-process subject (default: 2)")
    parser.add_argument(
        "--quick", action="store_true", help="2 layers, a smaller batch, 3 rounds: a look, not a result"
    )
    parser.add_argument("--profile", action="store_true", help="add a table of the largest costs of one step of each")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        metavar="DIRECTORY",
        help="measure saving and loading a checkpoint on that disk instead, beside torch.save of the same bytes",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample there too")
    parser.add_argument(
        "--slow-step-seconds",
        type=float,
        default=120.0,
        help="a subject whose step would take longer is measured on a small piece, once (default: 120)",
    )
    parser.add_argument("--start-timeout-seconds", type=float, default=300.0, help="for each subject (default: 300)")
    settings = parser.parse_args(arguments)
    for name in ("rounds", "threads"):
        if getattr(settings, name) < 1:
            parser.error(f"--{name} {getattr(settings, name)}: use at least 1")
    if settings.checkpoints is not None and not settings.checkpoints.is_dir():
        parser.error(f"--checkpoints {settings.checkpoints}: there is no such directory; make it first")
    if settings.json is not None and not settings.json.parent.is_dir():
        parser.error(f"--json {settings.json}: there is no directory {settings.json.parent}; make it first")
    if settings.quick:
        settings.rounds = min(settings.rounds, 3)
        settings.overrides = [*(_QUICK_WITH_DP if "dp" in settings.modes else _QUICK), *settings.overrides]
    return settings


def run_checkpoints(settings: argparse.Namespace) -> None:
    """Measure and show what checkpoints cost."""
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
    """Measure and show. Raises ConfigError, LayoutError and SubjectError."""
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
    """Exit code 0: measured; 1: a subject failed; 2: a wrong config."""
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
