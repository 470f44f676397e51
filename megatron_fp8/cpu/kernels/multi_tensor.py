"""Functions of `transformer_engine_torch` over lists of tensors: norms and scaling. Must not know optimizers.

`chunk_size` divides work over GPU blocks and has no meaning here. `noop_flag` is int32 `[1]`.
"""

import torch
from torch import Tensor

__all__ = ["multi_tensor_l2norm", "multi_tensor_scale", "multi_tensor_scale_tensor", "multi_tensor_unscale_l2norm"]


def multi_tensor_l2norm(
    chunk_size: int,  # noqa: ARG001
    noop_flag: Tensor,  # noqa: ARG001
    tensor_lists: list[list[Tensor]],
    per_tensor_python: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """L2 norm over all tensors of the one list, FP32 `[1]`, and with `per_tensor_python` of each, `[num_tensors]`.

    Sums of squares are FP32; NaN and infinities propagate.
    """
    (tensors,) = tensor_lists
    norms = _norms(tensors)
    total = torch.linalg.vector_norm(norms).reshape(1)
    return total, norms if per_tensor_python else torch.empty(0)


def multi_tensor_unscale_l2norm(
    chunk_size: int,  # noqa: ARG001
    noop_flag: Tensor,  # noqa: ARG001
    tensor_lists: list[list[Tensor]],
    inv_scale: Tensor,
    per_tensor_python: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm` of the tensors times `inv_scale` (FP32 `[1]`), which stay as they are."""
    (tensors,) = tensor_lists
    norms = _norms(tensors) * inv_scale.abs().reshape(())
    total = torch.linalg.vector_norm(norms).reshape(1)
    return total, norms if per_tensor_python else torch.empty(0)


def multi_tensor_scale(
    chunk_size: int,  # noqa: ARG001
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    scale: float,
) -> None:
    """Write `source * scale` (FP32) into each destination; lists are sources, destinations (which may be the same).

    Sets `noop_flag` to 1 where a source is not finite.
    """
    sources, destinations = tensor_lists
    for source, destination in zip(sources, destinations, strict=True):
        if source.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(source))).all()):
            noop_flag.fill_(1)
        if source.dtype == destination.dtype == torch.float32:
            torch.mul(source, scale, out=destination)
        else:
            destination.copy_(source.float() * scale)


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor
) -> None:
    """`multi_tensor_scale` with the scale in a tensor of one element."""
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, float(scale))


def _norms(tensors: list[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors])
