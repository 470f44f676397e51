"""`python -m megatron_fp8.doctor`: what is installed here, and what of it works.

Alone or under torchrun, then on all ranks together. Exit code 1 when something is a real fault, which training here
would fail of; what a machine only does without is no fault.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys

from megatron_fp8.doctor import report
from megatron_fp8.doctor.environment import launched
from megatron_fp8.doctor.examination import Patient, examine
from megatron_fp8.doctor.finding import Surroundings


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line to settings; a wrong one exits with code 2."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m megatron_fp8.doctor", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--run-root", default="runs", help="directory of the runs, run.root of the config (runs)")
    parser.add_argument("--min-gpus", type=int, default=0, metavar="N", help="fewer GPUs than N are a fault (0)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="a check that takes longer is a fault (300)"
    )
    settings = parser.parse_args(arguments)
    if settings.timeout <= 0:
        parser.error(f"--timeout {settings.timeout}: a check needs some time; use 300")
    return settings


def main(arguments: list[str] | None = None) -> int:
    """Examine, tell on rank 0, and return the exit code."""
    settings = parse_arguments(arguments)
    rank, world_size = launched() or (0, 1)
    surroundings = Surroundings(settings.run_root, settings.min_gpus, rank, world_size)
    found = examine(Patient(surroundings, launched() is not None, settings.timeout))
    if rank == 0:
        if settings.json:
            print(report.as_json(found))
        elif importlib.util.find_spec("rich") is None:
            report.show_plainly(found)
        else:
            report.show(found)
        sys.stdout.flush()
    return 1 if report.num_faults(found) else 0


if __name__ == "__main__":
    sys.exit(main())
