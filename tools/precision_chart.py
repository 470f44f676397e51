"""Prints the precision chart of a config: `megatron-fp8 precision-chart` as a script."""

from megatron_fp8.commands.precision_chart import main

if __name__ == "__main__":
    main()
