"""Converts between checkpoints and Hugging Face folders: `megatron-fp8 convert` as a script."""

from megatron_fp8.commands.convert import main

if __name__ == "__main__":
    main()
