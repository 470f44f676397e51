"""Functions of `transformer_engine_torch` over lists of tensors: norms, scaling, SGD. Must not know optimizers.

`chunk_size` divides work over GPU blocks and has no meaning here. `noop_flag` is int32 `[1]`. Adam is in `adam.py`.
"""

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels.list_limits import check_dtype, check_floats, check_lists, check_sgd
from megatron_fp8.cpu.kernels.scaling import scale_from_amax

__all__ = [
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]

# torch sums a whole tensor in a few FP32 lanes: its norm of 4 million values is 9e-5 too small, of 33 million 2e-3.
# Norms of pieces this long are right to 1e-9 together, and as fast (0.9 of the time, interleaved).
_PIECE_ELEMENTS = 2048


def _piece_norms(tensor: Tensor) -> Tensor:
    """FP32 L2 norms of consecutive pieces of a tensor, which lose nothing when they are added up in FP64."""
    flat = tensor.reshape(-1)
    whole = flat.numel() // _PIECE_ELEMENTS * _PIECE_ELEMENTS
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _PIECE_ELEMENTS), dim=1, dtype=torch.float32)
    if whole == flat.numel():
        return norms
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    return torch.cat([norms, rest.reshape(1)])


def _norms(tensors: list[Tensor]) -> Tensor:
    """FP64 `[num_tensors]`."""
    return torch.stack([torch.linalg.vector_norm(_piece_norms(t), dtype=torch.float64) for t in tensors])


def _results(norms: Tensor, per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    total = torch.linalg.vector_norm(norms).reshape(1).float()
    return total, norms.float() if per_tensor else torch.empty(0)


def multi_tensor_l2norm(
    chunk_size: int,  # noqa: ARG001
    noop_flag: Tensor,  # noqa: ARG001
    tensor_lists: list[list[Tensor]],
    per_tensor_python: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """L2 norm over all tensors of the one list, FP32 `[1]`, and with `per_tensor_python` of each, `[num_tensors]`.

    NaN and infinities propagate, and so does a sum of 2048 squares that exceeds FP32.
    """
    check_lists(tensor_lists, (1,))
    (tensors,) = tensor_lists
    check_floats("Input", tensors)
    return _results(_norms(tensors), per_tensor_python)


def multi_tensor_unscale_l2norm(
    chunk_size: int,  # noqa: ARG001
    noop_flag: Tensor,  # noqa: ARG001
    tensor_lists: list[list[Tensor]],
    inv_scale: Tensor,
    per_tensor_python: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm` of the tensors times `inv_scale` (FP32 `[1]`), which stay as they are."""
    check_lists(tensor_lists, (1,))
    (tensors,) = tensor_lists
    check_floats("Input", tensors)
    return _results(_norms(tensors) * inv_scale.abs().double().reshape(()), per_tensor_python)


def _all_finite(tensor: Tensor) -> bool:
    # Finite norms prove finite values in half the time of a look at each; only huge values need that look.
    return bool(torch.isfinite(_piece_norms(tensor)).all()) or bool(torch.isfinite(tensor).all())


def multi_tensor_scale(
    chunk_size: int,  # noqa: ARG001
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    scale: float,
) -> None:
    """Write `source * scale` (FP32) into each destination; lists are sources, destinations (which may be the same).

    Sets `noop_flag` to 1 where a source is not finite.
    """
    check_lists(tensor_lists, (2,))
    sources, destinations = tensor_lists
    check_floats("Input", sources)
    check_floats("Output", destinations)
    for source, destination in zip(sources, destinations, strict=True):
        if not _all_finite(source):
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


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,  # noqa: ARG001
    noop_flag: Tensor,  # noqa: ARG001
    tensor_lists: list[list[Tensor]],
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Lists amaxes, scales, scale_invs, FP32 `[1]` each: scales of current scaling from amaxes, and their inverses."""
    check_lists(tensor_lists, (3,))
    for tensors in tensor_lists:
        check_dtype("Scaling", tensors)
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        scale.copy_(scale_from_amax(amax, max_fp8, force_pow_2_scales, epsilon).reshape(scale.shape))
        torch.reciprocal(scale, out=scale_inv)


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,  # noqa: ARG001
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Lists g, p, momentum, and with a fourth FP16 copies of FP32 p; nothing is done where `noop_flag` is 1.

    In FP32, with `g = g * scale` and, before or after the momentum step, `g += weight_decay * p`:
    `m = momentum * m + (1 - dampening) * g` (`m = g` on the first run), `d = g + momentum * m` with Nesterov and m
    without, `p -= lr * d` (Sutskever et al. 2013 with the learning rate outside the velocity, as in torch). FP16 p is
    added to in FP16, so that `lr * d` is rounded first.
    """
    check_sgd(tensor_lists)
    if int(noop_flag) == 1:
        return
    copies = tensor_lists[3] if len(tensor_lists) > 3 else [None] * len(tensor_lists[0])
    for g, p, m, copy in zip(*tensor_lists[:3], copies, strict=True):
        gradient, parameter = g.float() * scale, p.float()
        if weight_decay != 0 and not wd_after_momentum:
            gradient.add_(parameter, alpha=weight_decay)
        if momentum != 0:
            velocity = gradient.clone() if first_run else m.float() * momentum + gradient * (1 - dampening)
            m.copy_(velocity)
            gradient = gradient.add_(velocity, alpha=momentum) if nesterov else velocity
        if weight_decay != 0 and wd_after_momentum:
            gradient.add_(parameter, alpha=weight_decay)
        p.add_((gradient * -lr).to(p.dtype))
        if copy is not None:
            copy.copy_(p)
