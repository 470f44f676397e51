"""Lets Transformer Engine's torch operators, which it declares for CUDA alone, run on CPU tensors.

They only call the extension. Must not know what they compute.
"""

from types import ModuleType

from torch.library import CustomOpDef


def allow_custom_ops_on_cpus(custom_ops: ModuleType) -> None:
    """Register the operators of `transformer_engine.pytorch.attention.custom_ops`, just imported, for CPUs too."""
    for operator in list(vars(custom_ops).values()):
        if isinstance(operator, CustomOpDef):
            operator.register_kernel("cpu", operator._init_fn)
