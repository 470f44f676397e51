"""The programs of this project: one module a command, each with `main(arguments)`; `megatron-fp8` runs them by name."""
