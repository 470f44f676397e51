"""Writes the HTML report of runs: `megatron-fp8 report` as a script."""

from megatron_fp8.commands.report import main

if __name__ == "__main__":
    main()
