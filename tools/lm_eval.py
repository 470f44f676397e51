"""Measures a checkpoint on tasks of lm-eval: `megatron-fp8 lm-eval` as a script."""

from megatron_fp8.commands.lm_eval import main

if __name__ == "__main__":
    main()
