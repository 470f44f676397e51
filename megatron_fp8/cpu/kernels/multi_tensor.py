"""Functions of `transformer_engine_torch` over lists of tensors (L2 norm, scaling, SGD), and what they and Adam refuse.

`chunk_size` splits work over GPU blocks and is ignored. `noop_flag` is int32 `[1]`. Adam is in `adam`. Sources of the
checks: TE's `common.cpp` (`makeTransformerEngineTensorList`), `multi_tensor_apply.cuh`, and `adam.cu`, `sgd.cu`,
`l2norm.cu` and `scale.cu` in `multi_tensor/`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels.casts import scale_from_amax

__all__ = (
    "multi_tensor_compute_scale_and_scale_inv multi_tensor_l2norm multi_tensor_scale multi_tensor_scale_tensor "
    "multi_tensor_sgd multi_tensor_unscale_l2norm"
).split()

Lists = Sequence[Sequence[Tensor]]
_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16
_FLOATS = (_FP32, _FP16, _BF16)
# Gradients, parameters, and whether FP16 copies of the parameters are written.
_SGD = {(_FP16, _FP16, False), (_FP32, _FP32, False), (_FP16, _FP32, True), (_FP32, _FP32, True)}


def check_lists(lists: Lists, counts: Sequence[int], per_element: int | None = None) -> None:
    """Raise RuntimeError unless the number of lists is one of `counts`, and they have equally many tensors, at least
    one.

    per_element: how many lists, None: all, the kernel processes element by element, in memory order and for as many
    elements as the first has.
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
        raise RuntimeError("the lists have no tensors, and TE reads the dtype of the first")
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
            raise RuntimeError(f"the tensors at {index} have {sizes} elements; TE assumes the first's number for all")
        if not _is_dense(tensor):
            raise RuntimeError(f"a tensor at {index} has gaps (strides {tensor.stride()}), which TE would not skip")
        if not _alike(tensor, first):
            strides = [each.stride() for each in tensors]
            raise RuntimeError(f"the tensors at {index} have different strides {strides}; TE reads memory in order")


def _is_dense(tensor: Tensor) -> bool:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.is_contiguous() or 1 + sum((size - 1) * stride for size, stride in steps) == tensor.numel()


def _alike(tensor: Tensor, first: Tensor) -> bool:
    return (tensor.is_contiguous() and first.is_contiguous()) or tensor.stride() == first.stride()


def check_floats(name: str, tensors: Sequence[Tensor], allowed: Sequence[torch.dtype] = _FLOATS) -> None:
    """Raise RuntimeError unless all `tensors` have the first's dtype, and that is one of `allowed`."""
    first = tensors[0].dtype
    for index, tensor in enumerate(tensors):
        if tensor.dtype != first:
            raise RuntimeError(f"{name} tensor {index} has dtype={tensor.dtype}, but expected dtype={first}")
    if first not in allowed:
        expected = ", ".join(map(str, allowed))
        raise RuntimeError(f"Unsupported dtype {first} of {name} tensors. Expected one of: {expected}.")


def check_adam(lists: Lists, count: Sequence[int], parameters: Sequence[torch.dtype] = _FLOATS) -> None:
    """Raise RuntimeError for lists g, p, m, v, ... whose number, memory layout or dtypes TE's Adam refuses.

    A fifth list is master weights or remainders; later ones have one value per tensor. parameters: allowed dtypes of p.
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
    """`check_adam` for the capturable forms, where gradients and parameters have the same dtype."""
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


# torch sums a tensor in a few FP32 lanes: its norm of 4 million values is 9e-5 too small, of 33 million 2e-3. Norms of
# pieces of this length, combined, are correct to 1e-9, and as fast (0.9 of the time, interleaved).
_PIECE_ELEMENTS = 2048


def _piece_norms(tensor: Tensor) -> Tensor:
    """FP32 L2 norms of consecutive pieces of a tensor, to be combined in FP64."""
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

    NaN and infinities propagate, as does overflow of a sum of 2048 squares.
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
    """`multi_tensor_l2norm` of the tensors times `inv_scale` (FP32 `[1]`), without changing them."""
    check_lists(tensor_lists, (1,))
    (tensors,) = tensor_lists
    check_floats("Input", tensors)
    return _results(_norms(tensors) * inv_scale.abs().double().reshape(()), per_tensor_python)


def _all_finite(tensor: Tensor) -> bool:
    # Finite norms imply finite values, in half the time of checking each; only huge values need that check.
    return bool(torch.isfinite(_piece_norms(tensor)).all()) or bool(torch.isfinite(tensor).all())


def multi_tensor_scale(
    chunk_size: int,  # noqa: ARG001
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    scale: float,
) -> None:
    """Write `source * scale` (FP32) to each destination; lists are sources and destinations (may be the same).

    Sets `noop_flag` to 1 if a source is not finite.
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
    """Lists amaxes, scales, scale_invs, FP32 `[1]` each: scales of current scaling, and their inverses."""
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
    """Lists g, p, momentum, and possibly FP16 copies of FP32 p. A `noop_flag` of 1 skips all.

    In FP32, with `g = g * scale` and, before or after the momentum step, `g += weight_decay * p`:
    `m = momentum * m + (1 - dampening) * g` (`m = g` on the first run), `d = g + momentum * m` with Nesterov and m
    without, `p -= lr * d` (Sutskever et al. 2013 with the learning rate outside the velocity, as in torch). For FP16 p,
    `lr * d` is rounded to FP16 first.
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
