"""CPU kernels that stand for those of Transformer Engine's compiled extension, one theme a file.

Each file lists in `__all__` the extension functions that it gives; `megatron_fp8.cpu.extension` collects them.
A kernel file must not import `transformer_engine` while it is itself imported: TE imports the extension first.
"""
