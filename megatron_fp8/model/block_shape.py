"""What all blocks of a stage share, and what their parts are made with. Must not know pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine.pytorch as te
from megatron.core import tensor_parallel
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import ModelConfig


def zeros(weight: Tensor) -> Tensor:
    """The values come from `model/init.py`; until then zeros, since FP8 weights enter their amax into the history."""
    return nn.init.zeros_(weight)


@dataclass(frozen=True)
class BlockShape:
    """What all blocks of a stage share; `tp`: the tensor-parallel group, `dtype` that of the parameters."""

    model: ModelConfig
    layout: Layout
    tp: ProcessGroup
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def has_pre_norms(self) -> bool:
        """Whether attention and MLP normalize their inputs."""
        return self.model.norm_placement != "post"

    @property
    def linear(self) -> dict[str, Any]:
        """Arguments of every module with linear layers."""
        return {
            "tp_group": self.tp,
            "tp_size": self.tp.size(),
            "params_dtype": self.dtype,
            "get_rng_state_tracker": tensor_parallel.get_cuda_rng_tracker,
            # TE accumulates into main_grad inside the GEMM for the fused QKV weight only.
            "fuse_wgrad_accumulation": self.model.fuse_qkv_params,
            "sequence_parallel": self.sequence_parallel,
            "init_method": zeros,
            "device": self.device,
        }

    @property
    def norm(self) -> dict[str, Any]:
        """Arguments of every module that normalizes its input."""
        return {
            "eps": self.model.norm_epsilon,
            "normalization": self.model.normalization,
            "zero_centered_gamma": self.model.layernorm_zero_centered_gamma,
        }

    def make_norm(self, features: int, sequence_parallel: bool | None = None) -> nn.Module:
        """A norm that stands alone; `sequence_parallel` None: of a sequence divided like the residual stream."""
        is_layer_norm = self.model.normalization == "LayerNorm"
        if not self.model.norm_affine:
            # TE's fused norms return gradients for a weight that is none.
            plain: type[nn.Module] = nn.LayerNorm if is_layer_norm else nn.RMSNorm
            return plain(features, eps=self.model.norm_epsilon, elementwise_affine=False)
        kind: type[nn.Module] = te.LayerNorm if is_layer_norm else te.RMSNorm
        return kind(
            features,
            eps=self.model.norm_epsilon,
            sequence_parallel=self.sequence_parallel if sequence_parallel is None else sequence_parallel,
            zero_centered_gamma=self.model.layernorm_zero_centered_gamma,
            dtype=self.dtype,
            device=self.device,
        )

    def finish_norm(self, module: nn.Module) -> None:
        """Make constants of a module's norm where norms learn nothing: they are not trained, saved or counted."""
        if self.model.norm_affine:
            return
        constants = {"layer_norm_weight": 0.0 if self.model.layernorm_zero_centered_gamma else 1.0}
        if self.model.normalization == "LayerNorm":
            constants["layer_norm_bias"] = 0.0
        for name, value in constants.items():
            constant = torch.full_like(getattr(module, name), value, requires_grad=False)
            delattr(module, name)
            module.register_buffer(name, constant, persistent=False)
