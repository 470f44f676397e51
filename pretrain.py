"""Pretrain a GPT model: `torchrun --nproc-per-node N pretrain.py CONFIG [section.key=value ...]`.

Parses and checks the config before torch is imported; a mistake ends with exit code 2.
"""

import sys
import time
from functools import partial

from megatron_fp8.checkpoint.start import choose_start
from megatron_fp8.config.cli import parse_command_line
from megatron_fp8.config.determinism import run_variables
from megatron_fp8.config.load import LoadedConfig, process_environment
from megatron_fp8.config.problem import Problem
from megatron_fp8.data.check import check_data
from megatron_fp8.faults.run_lock import Holds
from megatron_fp8.parallel.process_environment import set_variables


def main() -> None:
    """Parse, check, train."""
    started = time.monotonic()
    holds = Holds()
    command = parse_command_line(sys.argv[1:], process_environment(), check_data, choose_start, _plan, holds)
    set_variables(run_variables(command.config))
    from megatron_fp8.faults.exit_codes import ExitCode
    from megatron_fp8.faults.report import run_reporting
    from megatron_fp8.parallel.process_group import global_rank
    from megatron_fp8.train.job import run_job

    job = partial(run_job, command.config, command.vocab_size, command.start, holds, started, command.quiet)
    if run_reporting(job, global_rank()).stopped is not None:
        sys.exit(ExitCode.STOPPED)


def _plan(loaded: LoadedConfig, world_size: int | None) -> tuple[str, list[Problem]]:
    # Tables take a tenth of a second to import, which a run does without.
    from megatron_fp8.planner.resolve import describe_plan

    return describe_plan(loaded, world_size, check_data)


# Workers that are spawned import this file.
if __name__ == "__main__":
    main()
