"""For every kind of parameter, the axis that tensor parallelism shards and its fused parts, in one table.

Whoever needs to know how a parameter lies on the ranks (initialization, checkpoints, export) asks here. Must not know
process groups.
"""

from dataclasses import dataclass

import torch

from megatron_fp8.config.layout import GATED_ACTIVATIONS


@dataclass(frozen=True)
class ParameterSharding:
    """How a parameter lies on the tensor-parallel ranks.

    `axis`: the tensor axis that is divided; None: every rank holds the whole. `num_parts`: parameters that are
    stacked along `axis`, each divided by itself (the gate and the up projection of a gated MLP).
    `is_output_projection`: writes into the residual stream, so its initial weights are scaled down.
    `is_padded_vocab`: its rows are vocabulary entries, padding last. `is_norm`: what a norm multiplies by.
    """

    axis: int | None
    num_parts: int = 1
    is_output_projection: bool = False
    is_padded_vocab: bool = False
    is_norm: bool = False

    def local_shard(self, full: torch.Tensor, tp_rank: int, tp_size: int) -> torch.Tensor:
        """This rank's part of the whole parameter."""
        if self.axis is None:
            return full
        parts = full.chunk(self.num_parts, dim=self.axis)
        return torch.cat([part.chunk(tp_size, dim=self.axis)[tp_rank] for part in parts], dim=self.axis)

    def full_shape(self, local_shape: torch.Size, tp_size: int) -> list[int]:
        """Shape of the whole parameter from that of one rank's part."""
        shape = list(local_shape)
        if self.axis is not None:
            shape[self.axis] *= tp_size
        return shape


_COLUMN = ParameterSharding(axis=0)
_ROW = ParameterSharding(axis=1, is_output_projection=True)
_WHOLE = ParameterSharding(axis=None)
_VOCAB = ParameterSharding(axis=0, is_padded_vocab=True)
_GATED_COLUMN = ParameterSharding(axis=0, num_parts=2)

_NORM = ParameterSharding(axis=None, is_norm=True)
_HEADS_NORM = ParameterSharding(axis=0, is_norm=True)

# The end of a parameter's name -> how it is divided. With `fuse_qkv_params` the QKV rows are ordered by query group
# (TE's interleaved order), so that a contiguous block of rows holds whole groups. `qkv` and `layernorm_mlp.fc1` are the
# modules of blocks without norms before them, and of activations without a kernel.
_TABLE: dict[str, ParameterSharding] = {
    "embedding.word_embeddings.weight": _VOCAB,
    "embedding.position_embeddings.weight": _WHOLE,
    **{
        f"{module}.{part}{kind}": _COLUMN
        for module in ("layernorm_qkv", "self_attention.qkv")
        for part in ("", "query_", "key_", "value_")
        for kind in ("weight", "bias")
    },
    "self_attention.q_layernorm.weight": _NORM,
    "self_attention.q_layernorm.bias": _WHOLE,
    "self_attention.k_layernorm.weight": _NORM,
    "self_attention.k_layernorm.bias": _WHOLE,
    "self_attention.q_norm.weight": _HEADS_NORM,
    "self_attention.k_norm.weight": _HEADS_NORM,
    "core_attention.softmax_offset": _COLUMN,
    "self_attention.proj.weight": _ROW,
    "self_attention.proj.bias": _WHOLE,
    "layer_norm_weight": _NORM,
    "layer_norm_bias": _WHOLE,
    **{
        f"layernorm_mlp.{layer}{separator}{kind}": sharding
        for separator in ("_", ".")
        for layer, kind, sharding in (
            ("fc1", "weight", _COLUMN),
            ("fc1", "bias", _COLUMN),
            ("fc2", "weight", _ROW),
            ("fc2", "bias", _WHOLE),
        )
    },
    **{
        f"{norm}.{kind}": sharding
        for norm in ("post_attention_norm", "post_mlp_norm", "final_norm")
        for kind, sharding in (("weight", _NORM), ("bias", _WHOLE))
    },
    "output_layer.weight": _VOCAB,
    "output_layer.bias": _VOCAB,
}
_GATED_NAMES = tuple(f"layernorm_mlp.fc1{separator}{kind}" for separator in "_." for kind in ("weight", "bias"))


def parameter_sharding(name: str, activation: str) -> ParameterSharding:
    """How the parameter called `name` is divided under the MLP activation `activation`.

    Raises KeyError for a name that the table lacks.
    """
    if activation in GATED_ACTIVATIONS and name.endswith(_GATED_NAMES):
        return _GATED_COLUMN
    for ending, sharding in _TABLE.items():
        if name == ending or name.endswith("." + ending):
            return sharding
    raise KeyError(
        f"no sharding is known for parameter {name!r}; add it to the table in megatron_fp8/model/sharding.py"
    )
