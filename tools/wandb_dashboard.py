"""Prints or saves the dashboard of runs in wandb: `megatron-fp8 dashboard` as a script."""

from megatron_fp8.commands.dashboard import main

if __name__ == "__main__":
    main()
