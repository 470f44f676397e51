"""`python -m megatron_fp8.doctor`: the command `doctor`."""

from megatron_fp8.commands.doctor import main

if __name__ == "__main__":
    main(program="python -m megatron_fp8.doctor")
