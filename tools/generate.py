"""Generates text with the model of a checkpoint: `megatron-fp8 generate` as a script."""

from megatron_fp8.commands.generate import main

if __name__ == "__main__":
    main()
