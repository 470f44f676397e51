"""Measures the loss of a checkpoint on token files: `megatron-fp8 evaluate` as a script."""

from megatron_fp8.commands.evaluate import main

if __name__ == "__main__":
    main()
