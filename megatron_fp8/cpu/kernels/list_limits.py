"""What Transformer Engine's multi-tensor functions refuse, with its words. Must not know what they compute.

Sources: TE's `common.cpp` (`makeTransformerEngineTensorList`), `multi_tensor_apply.cuh`, and each function's checks in
`multi_tensor/adam.cu`, `sgd.cu`, `l2norm.cu`, `scale.cu`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Lists = Sequence[Sequence[Tensor]]
_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_FLOATS = (_FP32, _FP16, _BF16)
# Gradients, parameters, and whether FP16 copies of the parameters are written.
_SGD = {(_FP16, _FP16, False), (_FP32, _FP32, False), (_FP16, _FP32, True), (_FP32, _FP32, True)}


def check_lists(lists: Lists, counts: Sequence[int], per_element: int | None = None) -> None:
    """Raise RuntimeError unless there are as many lists as one of `counts`, of equally many tensors, and not of none.

    per_element: how many of the lists the kernel walks element by element, None: all. It reads and writes them in the
    order of memory, for as many elements as the first has.
    """
    if not lists:
        raise RuntimeError("List of tensors is empty.")
    for tensors in lists:
        if len(tensors) != len(lists[0]):
            raise RuntimeError(f"Wrong number of tensors: {[len(each) for each in lists]}")
    if len(lists) not in counts:
        expected = " or ".join(map(str, counts))
        raise RuntimeError(f"Expected {expected} tensor lists, but found {len(lists)}")
    if not lists[0]:
        raise RuntimeError("the lists hold no tensors, and TE reads the dtype of the first")
    for index, together in enumerate(zip(*lists[:per_element], strict=True)):
        _check_memory(index, together)


def _check_memory(index: int, tensors: tuple[Tensor, ...]) -> None:
    first = tensors[0]
    if not first.numel():
        raise RuntimeError(
            f"multi_tensor_apply expects tensors with at least one chunk, but those at {index} have no elements"
        )
    for tensor in tensors:
        if tensor.numel() != first.numel():
            sizes = [each.numel() for each in tensors]
            raise RuntimeError(f"the tensors at {index} have {sizes} elements; TE takes the first's number for all")
        if not _is_dense(tensor):
            raise RuntimeError(f"a tensor at {index} has gaps (strides {tensor.stride()}), which TE would not skip")
        if not _alike(tensor, first):
            strides = [each.stride() for each in tensors]
            raise RuntimeError(f"the tensors at {index} lie differently in memory, strides {strides}; TE walks memory")


def _is_dense(tensor: Tensor) -> bool:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.is_contiguous() or 1 + sum((size - 1) * stride for size, stride in steps) == tensor.numel()


def _alike(tensor: Tensor, first: Tensor) -> bool:
    return (tensor.is_contiguous() and first.is_contiguous()) or tensor.stride() == first.stride()


def check_floats(name: str, tensors: Sequence[Tensor], allowed: Sequence[torch.dtype] = _FLOATS) -> None:
    """Raise RuntimeError unless all `tensors` are of the first's dtype, and that is one of `allowed`."""
    first = tensors[0].dtype
    for index, tensor in enumerate(tensors):
        if tensor.dtype != first:
            raise RuntimeError(f"{name} tensor {index} has dtype={tensor.dtype}, but expected dtype={first}")
    if first not in allowed:
        expected = ", ".join(map(str, allowed))
        raise RuntimeError(f"Unsupported dtype {first} of {name} tensors. Expected one of: {expected}.")


def check_adam(lists: Lists, count: Sequence[int], parameters: Sequence[torch.dtype] = _FLOATS) -> None:
    """Raise RuntimeError for lists g, p, m, v, of which TE's Adam refuses the number, memory or dtypes.

    A fifth list is masters or remainders, and what follows it one value a tensor. parameters: dtypes that p may have.
    """
    check_lists(lists, count, per_element=5)
    check_floats("Grad", lists[0])
    check_floats("Param", lists[1], parameters)
    for index, (m, v) in enumerate(zip(lists[2], lists[3], strict=True)):
        if m.dtype != v.dtype or m.dtype not in (_FP32, _BF16):
            raise RuntimeError(
                "First and second moment tensors must both be Float32 or both be BFloat16, but tensor"
                f" {index} has first moment dtype={m.dtype} and second moment dtype={v.dtype}"
            )


def check_adam_alike(lists: Lists, count: int) -> None:
    """`check_adam` of the capturable forms, where gradients and parameters have one dtype."""
    check_adam(lists, (count,))
    if lists[0][0].dtype != lists[1][0].dtype:
        raise RuntimeError(f"Param tensor 0 has dtype={lists[1][0].dtype}, but expected dtype={lists[0][0].dtype}")


def check_dtype(name: str, tensors: Sequence[Tensor], dtype: torch.dtype = _FP32) -> None:
    """Raise RuntimeError unless all `tensors` are of `dtype`."""
    for index, tensor in enumerate(tensors):
        if tensor.dtype != dtype:
            raise RuntimeError(f"{name} tensor {index} has dtype={tensor.dtype}, but expected dtype={dtype}")


def check_sgd(lists: Lists) -> None:
    """Raise RuntimeError for lists g, p, momentum and, with a fourth, copies of p, that SGD has no kernel for."""
    check_lists(lists, (3, 4))
    copied = len(lists) == 4
    if copied and any(copy.dtype != _FP16 for copy in lists[3]):
        raise RuntimeError("Additional output tensors should always be fp16.")
    for g, p, m in zip(*lists[:3], strict=True):
        if (g.dtype, p.dtype, copied) not in _SGD or m.dtype != p.dtype:
            raise RuntimeError(
                f"Unsupported combination of weight and gradient types: gradient {g.dtype}, weight {p.dtype}, momentum"
                f" {m.dtype}, {'with' if copied else 'without'} copies"
            )
