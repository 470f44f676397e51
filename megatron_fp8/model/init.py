"""Initial weights, which are the same in every parallel layout.

A parameter's values depend on the seed and its global name (layers counted over the whole model) only: each rank
draws the whole parameter from a generator of its own and keeps its part. Drawn on the CPU in FP32, so that a laptop
and a cluster start from the same weights. Rejected: Megatron's per-rank generators, whose weights change with the
tensor-parallel size, and whose shards are equal when a seed is forgotten.

Must not know optimizers or formats: the values are rounded to whatever dtype the parameter has.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron_fp8.model.sharding import parameter_sharding


@dataclass(frozen=True)
class InitSettings:
    """What the initial weights depend on.

    Matrices are normal with `std`, output projections with `std / sqrt(2 num_layers)` (GPT-2, section 2.3; Megatron's
    `scaled_init_method_normal`); norm weights are 1, or 0 with `zero_centered_norms`; biases and attention sinks are 0;
    rows of padded vocabulary entries are 0. `vocab_size`: entries before padding.
    """

    seed: int
    std: float
    num_layers: int
    vocab_size: int
    activation: str
    zero_centered_norms: bool = False


@torch.no_grad()
def init_parameters(named: Iterable[tuple[str, nn.Parameter]], settings: InitSettings, tp: ProcessGroup) -> None:
    """Fill the parameters, given by global name, with this rank's parts of their initial values."""
    for name, parameter in named:
        sharding = parameter_sharding(name, settings.activation)
        shape = sharding.full_shape(parameter.shape, tp.size())
        full = initial_value(name, shape, settings)
        value = sharding.local_shard(full, tp.rank(), tp.size()).to(parameter.dtype)
        parameter.copy_(value)
        if hasattr(parameter, "get_high_precision_init_val"):
            # An FP8 weight: its master starts from these values, not from what FP8 made of them.
            parameter.get_high_precision_init_val().copy_(value)


def initial_value(name: str, shape: list[int], settings: InitSettings) -> torch.Tensor:
    """The whole parameter's initial value: FP32 on the CPU, of the given whole shape."""
    sharding = parameter_sharding(name, settings.activation)
    if sharding.is_norm and not settings.zero_centered_norms:
        return torch.ones(shape)
    if sharding.is_norm or name.endswith(("bias", "softmax_offset")):
        return torch.zeros(shape)
    std = settings.std
    if sharding.is_output_projection:
        std /= math.sqrt(2.0 * settings.num_layers)
    generator = torch.Generator().manual_seed(_name_seed(settings.seed, name))
    if not sharding.is_padded_vocab:
        return torch.empty(shape).normal_(0.0, std, generator=generator)
    # The padding depends on the tensor-parallel size, so it must not take part in the draw.
    full = torch.zeros(shape)
    full[: settings.vocab_size] = torch.empty(settings.vocab_size, *shape[1:]).normal_(0.0, std, generator=generator)
    return full


def _name_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
