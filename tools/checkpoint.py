"""Inspects, verifies and compares checkpoints: `megatron-fp8 checkpoint` as a script."""

from megatron_fp8.commands.checkpoint import main

if __name__ == "__main__":
    main()
