"""Pretrain a GPT model: `torchrun --nproc-per-node N pretrain.py CONFIG [section.key=value ...]`.

Parses and checks the config before torch is imported; a mistake ends with exit code 2.
"""

import sys
import time

from megatron_fp8.config.cli import parse_command_line
from megatron_fp8.config.load import process_environment
from megatron_fp8.data.check import check_data


def main() -> None:
    """Parse, check, train."""
    started = time.monotonic()
    command = parse_command_line(sys.argv[1:], process_environment(), check_data)
    from megatron_fp8.faults.report import run_reporting
    from megatron_fp8.parallel.start import global_rank
    from megatron_fp8.train.job import run_job

    run_reporting(lambda: run_job(command.config, command.vocab_size, started), global_rank())


# Workers that are spawned import this file.
if __name__ == "__main__":
    main()
