"""What is done to queries and keys between their projection and attention, beyond RoPE.

Transformer Engine's `MultiheadAttention` calls them as its `q_norm` and `k_norm`, with `[s, b, heads, d]` or
`[t, heads, d]`.
"""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class AllHeadsRMSNorm(nn.Module):
    """RMSNorm over the features of all heads, on all tensor-parallel ranks, together (OLMo 2).

    `weight`: this rank's share, `[heads x d]`.
    """

    def __init__(self, features: int, eps: float, tp: ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features, dtype=dtype, device=device))
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)
        self._eps = eps
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, `[..., heads, d]`; the mean is taken in FP32."""
        rows = x.flatten(-2).float()
        squares = rows.square().sum(-1, keepdim=True)
        # Summed over ranks in both directions: every rank's output depends on every rank's features.
        squares = tensor_parallel.reduce_from_tensor_model_parallel_region(squares, group=self._tp)
        squares = tensor_parallel.copy_to_tensor_model_parallel_region(squares, group=self._tp)
        mean = squares / (rows.shape[-1] * self._tp.size())
        normed = rows * torch.rsqrt(mean + self._eps) * self.weight.float()
        return normed.to(x.dtype).view(x.shape)


class RotatedFeatureScale(nn.Module):
    """Multiplies the features of each head that RoPE rotates, the first `rotary_dim`, by a constant."""

    def __init__(self, factor: float, rotary_dim: int) -> None:
        super().__init__()
        self._factor = factor
        self._rotary_dim = rotary_dim

    def forward(self, x: Tensor) -> Tensor:
        """Scale `x`, `[..., heads, d]`."""
        return torch.cat([x[..., : self._rotary_dim] * self._factor, x[..., self._rotary_dim :]], dim=-1)
