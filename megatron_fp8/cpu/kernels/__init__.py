"""CPU kernels in place of those of Transformer Engine's compiled extension.

Each file lists its extension functions in `__all__`; `megatron_fp8.cpu.extension` collects them. A kernel file must not
import `transformer_engine` at its top: TE imports the extension first.
"""
