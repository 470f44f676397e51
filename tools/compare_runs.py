"""Finds the first step at which two runs differ: `megatron-fp8 compare-runs` as a script."""

from megatron_fp8.commands.compare_runs import main

if __name__ == "__main__":
    main()
