"""Plans a run or searches for layouts: `megatron-fp8 plan` as a script."""

from megatron_fp8.commands.plan import main

if __name__ == "__main__":
    main()
