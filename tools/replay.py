"""Rewrites the views of a run from its record: `megatron-fp8 replay` as a script."""

from megatron_fp8.commands.replay import main

if __name__ == "__main__":
    main()
