"""Adam of `transformer_engine_torch` over lists of tensors.

`mode` 1 decouples the weight decay (AdamW), 0 adds it to the gradient. For every parameter, all in FP32:

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
    p = p - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p)        (mode 1)

(Loshchilov and Hutter, 2019, algorithm 2; TE, `multi_tensor/adam.cu`). FP32 AdamW uses torch's fused CPU kernel, one
pass over memory instead of about ten, in another order of operations: equal up to rounding, and in the last place of
`v` dependent on a value's position in its storage. Infinities and NaN in gradients propagate; `chunk_size` is ignored.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fp8.cpu.kernels import casts
from megatron_fp8.cpu.kernels.casts import torch_dtype
from megatron_fp8.cpu.kernels.multi_tensor import check_adam, check_adam_alike, check_dtype

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
]


@dataclass(frozen=True)
class _Adam:
    """The hyperparameters; `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    step: int
    mode: int
    bias_correction: int
    weight_decay: float

    def update(self, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> None:
        """Update FP32 `p` and the moments in place; lower-precision m and v are rounded once."""
        g = g.float()
        if self.mode == 0 and self.weight_decay != 0:
            g = g.add(p, alpha=self.weight_decay)
        if self.mode == 1 and self.bias_correction and all(t.dtype == torch.float32 for t in (p, m, v)):
            options: dict[str, Any] = {"lr": self.lr, "beta1": self.beta1, "beta2": self.beta2, "eps": self.epsilon}
            step = torch.tensor(float(self.step))
            torch._fused_adamw_(
                [p], [g], [m], [v], [], [step], **options, weight_decay=self.weight_decay, amsgrad=False, maximize=False
            )
            return
        m32, v32 = m.float(), v.float()
        m32.mul_(self.beta1).add_(g, alpha=1 - self.beta1)
        v32.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        correction1 = 1 - self.beta1**self.step if self.bias_correction else 1.0
        correction2 = 1 - self.beta2**self.step if self.bias_correction else 1.0
        update = (m32 / correction1) / ((v32 / correction2).sqrt_().add_(self.epsilon))
        if self.mode == 1:
            update.add_(p, alpha=self.weight_decay)
        p.add_(update, alpha=-self.lr)
        if m32 is not m:
            m.copy_(m32)
        if v32 is not v:
            v.copy_(v32)


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,  # noqa: ARG001
    noop_flag: Tensor,  # noqa: ARG001
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Lists g, p (FP32, BF16 or FP16), m, v, and possibly FP32 master weights, which are then rounded to p."""
    check_adam(tensor_lists, (4, 5))
    adam = _Adam(lr, beta1, beta2, epsilon, int(step), mode, bias_correction, weight_decay)
    if len(tensor_lists) == 4:
        for g, p, m, v in zip(*tensor_lists, strict=True):
            _update_rounded(adam, g, p, m, v)
        return
    check_dtype("Master param", tensor_lists[4])
    for g, p, m, v, master in zip(*tensor_lists, strict=True):
        adam.update(g, master, m, v)
        p.copy_(master)


def _update_rounded(adam: _Adam, g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> None:
    if p.dtype == torch.float32:
        adam.update(g, p, m, v)
        return
    p32 = p.float()
    adam.update(g, p32, m, v)
    p.copy_(p32)


@torch.no_grad()
def multi_tensor_adam_param_remainder(
    chunk_size: int,  # noqa: ARG001
    noop_flag: Tensor,  # noqa: ARG001
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Lists g, p (BF16), m, v, remainder (int16): the FP32 master weight is p's 16 bits, then the remainder's.

    p is the master weight rounded half up, so a negative remainder means that p was rounded up.
    """
    check_adam(tensor_lists, (5,), [torch.bfloat16])
    check_dtype("Param remainder", tensor_lists[4], torch.int16)
    adam = _Adam(lr, beta1, beta2, epsilon, int(step), mode, bias_correction, weight_decay)
    for g, p, m, v, remainder in zip(*tensor_lists, strict=True):
        low = remainder.to(torch.int32)
        high = p.view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
        master = ((high << 16) | (low & 0xFFFF)).view(torch.float32)
        adam.update(g, master, m, v)
        bits = master.view(torch.int32)
        low = (bits << 16) >> 16
        remainder.copy_(low.to(torch.int16))
        p.view(torch.int16).copy_(((bits >> 16) + (low < 0).to(torch.int32)).to(torch.int16))


@torch.no_grad()
def multi_tensor_adam_fp8(
    chunk_size: int,  # noqa: ARG001
    noop_flag: Tensor,  # noqa: ARG001
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    fp8_dtype: int,
) -> None:
    """Lists g, p (FP8 bytes), m, v, master (FP32), scale, amax, scale_inv: FP8 parameters with delayed scaling.

    p is master times scale as float8; `amax` is raised to the master weight's amax; `scale_inv` is 1 / scale.
    """
    check_adam(tensor_lists, (8,), [torch.uint8, torch_dtype(fp8_dtype)])
    names = ("First moment", "Second moment", "Master param", "Scale", "Absmax", "Scale-inverse")
    for name, tensors in zip(names, tensor_lists[2:], strict=True):
        check_dtype(name, tensors)
    adam = _Adam(lr, beta1, beta2, epsilon, int(step), mode, bias_correction, weight_decay)
    for g, p, m, v, master, scale, amax, scale_inv in zip(*tensor_lists, strict=True):
        adam.update(g, master, m, v)
        casts.encode_fp8(master, scale, torch_dtype(fp8_dtype), p)
        amax.copy_(torch.maximum(amax, casts.tensor_amax(master).reshape(amax.shape)))
        scale_inv.copy_(torch.reciprocal(scale))


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,  # noqa: ARG001
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """Lists g, p, m, v. Gradients are multiplied by `inv_scale` first, in place. A `noop_flag` of 1 skips all."""
    check_adam_alike(tensor_lists, 4)
    if int(noop_flag) == 1:
        return
    adam = _Adam(float(lr), beta1, beta2, epsilon, int(step), mode, bias_correction, weight_decay)
    for g, p, m, v in zip(*tensor_lists, strict=True):
        _update_rounded(adam, g.mul_(inv_scale.reshape(())), p, m, v)


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,  # noqa: ARG001
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """`multi_tensor_adam_capturable` with FP32 master weights as a fifth list."""
    check_adam_alike(tensor_lists, 5)
    check_dtype("Master param", tensor_lists[4])
    if int(noop_flag) == 1:
        return
    adam = _Adam(float(lr), beta1, beta2, epsilon, int(step), mode, bias_correction, weight_decay)
    for g, p, m, v, master in zip(*tensor_lists, strict=True):
        adam.update(g.mul_(inv_scale.reshape(())), master, m, v)
        p.copy_(master)
