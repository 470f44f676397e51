"""`python -m megatron_fp8 COMMAND`, and `torchrun -m megatron_fp8 COMMAND`: the same as `megatron-fp8 COMMAND`."""

from megatron_fp8.commands.main import main

# Workers that are spawned import this file.
if __name__ == "__main__":
    main()
