"""Pairs every tensor of ours with its counterparts in a family's files. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_fp8.config.layer_kinds import mlp_has_bias, mlp_is_separate, qkv_has_bias
from megatron_fp8.config.layout import GATED_ACTIVATIONS, head_size, mlp_size, query_groups
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.hf.mapping import Shape, TensorGroup, same


@dataclass(frozen=True)
class TensorNames:
    """A family's names of a model's parts; those of a layer follow `layer`, whose {} is its number from 0.

    `qkv`, `fc1`: one tensor for each part, or one in which the parts are stacked: QKV as a whole, or with
    `qkv_by_group` by query group. `transposed`: linear weights are `[in, out]` (GPT-2's Conv1D).
    """

    embedding: str = "model.embed_tokens"
    positions: str = ""
    layer: str = "model.layers.{}"
    pre_attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_by_group: bool = False
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    proj: str = "self_attn.o_proj"
    post_attention_norm: str = ""
    pre_mlp_norm: str = "post_attention_layernorm"
    fc1: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    fc2: str = "mlp.down_proj"
    post_mlp_norm: str = ""
    final_norm: str = "model.norm"
    head: str = "lm_head"
    transposed: bool = False


def tensor_groups(model: ModelConfig, names: TensorNames, vocab_size: int) -> Iterator[TensorGroup]:
    """All tensors of the model, in forward order."""
    hidden = model.hidden_size
    yield same("embedding.word_embeddings.weight", f"{names.embedding}.weight", vocab_size, hidden)
    if names.positions:
        num_positions = model.max_position_embeddings or model.seq_length
        yield same("embedding.position_embeddings.weight", f"{names.positions}.weight", num_positions, hidden)
    for index in range(model.num_layers):
        layer = _Layer(model, names, f"layers.{index}.", names.layer.format(index) + ".")
        yield from layer.attention()
        yield from layer.mlp()
    yield from _norm(model, "final_norm.", names.final_norm, hidden)
    if model.untie_embeddings_and_output_weights:
        yield same("output_layer.weight", f"{names.head}.weight", vocab_size, hidden)
    if model.add_output_bias:
        yield same("output_layer.bias", f"{names.head}.bias", vocab_size)


@dataclass(frozen=True)
class _Layer:
    """One layer; `ours` and `theirs` come before the names of its parts."""

    model: ModelConfig
    names: TensorNames
    ours: str
    theirs: str

    def attention(self) -> Iterator[TensorGroup]:
        model, names, hidden, groups = self.model, self.names, self.model.hidden_size, query_groups(self.model)
        size = head_size(model)
        queries, keys = model.num_attention_heads * size, groups * size
        attention, has_pre_norm = f"{self.ours}self_attention.", model.norm_placement != "post"
        qkv = f"{attention}{'layernorm_qkv' if has_pre_norm else 'qkv'}."
        if has_pre_norm:
            yield from self._norm(f"{qkv}layer_norm_", names.pre_attention_norm, hidden)
        for kind, columns in _kinds(hidden, qkv_has_bias(model)):
            parts = tuple(f"{qkv}{part}_{kind}" for part in ("query", "key", "value"))
            yield TensorGroup(
                (f"{qkv}{kind}",) if model.fuse_qkv_params else parts,
                tuple(f"{self.theirs}{name}.{kind}" for name in names.qkv),
                ((queries, *columns), (keys, *columns), (keys, *columns)),
                num_blocks=groups,
                their_blocks=groups if names.qkv_by_group else 1,
                transposed=names.transposed,
            )
        if model.qk_layernorm == "all_heads":
            yield from self._norm(f"{attention}q_norm.", names.query_norm, queries)
            yield from self._norm(f"{attention}k_norm.", names.key_norm, keys)
        elif model.qk_layernorm != "none":
            yield from self._norm(f"{attention}q_layernorm.", names.query_norm, size)
            yield from self._norm(f"{attention}k_layernorm.", names.key_norm, size)
        yield from self._linear(f"{attention}proj.", (names.proj,), (hidden,), queries, model.add_bias_linear)
        if model.norm_placement != "pre":
            yield from self._norm(f"{self.ours}post_attention_norm.", names.post_attention_norm, hidden)

    def mlp(self) -> Iterator[TensorGroup]:
        model, names, hidden, ffn = self.model, self.names, self.model.hidden_size, mlp_size(self.model)
        has_pre_norm = model.norm_placement != "post"
        is_separate = mlp_is_separate(model)
        mlp = f"{self.ours}layernorm_mlp."
        fc1, fc2 = (f"{mlp}fc1.", f"{mlp}fc2.") if is_separate else (f"{mlp}fc1_", f"{mlp}fc2_")
        if has_pre_norm and model.parallel_attention_mlp != "shared_norm":
            yield from self._norm(f"{fc1 if is_separate else mlp}layer_norm_", names.pre_mlp_norm, hidden)
        rows = (ffn, ffn) if model.activation in GATED_ACTIVATIONS else (ffn,)
        yield from self._linear(fc1, names.fc1, rows, hidden, mlp_has_bias(model))
        yield from self._linear(fc2, (names.fc2,), (hidden,), ffn, mlp_has_bias(model))
        if model.norm_placement != "pre":
            yield from self._norm(f"{self.ours}post_mlp_norm.", names.post_mlp_norm, hidden)

    def _norm(self, ours: str, theirs: str, features: int) -> Iterator[TensorGroup]:
        yield from _norm(self.model, ours, self.theirs + theirs, features)

    def _linear(
        self, ours: str, theirs: tuple[str, ...], rows: tuple[int, ...], in_features: int, has_bias: bool
    ) -> Iterator[TensorGroup]:
        for kind, columns in _kinds(in_features, has_bias):
            yield TensorGroup(
                (f"{ours}{kind}",),
                tuple(f"{self.theirs}{name}.{kind}" for name in theirs),
                tuple((part, *columns) for part in rows),
                transposed=self.names.transposed,
            )


def _norm(model: ModelConfig, ours: str, theirs: str, features: int) -> Iterator[TensorGroup]:
    if model.norm_affine:
        for kind in ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",):
            yield same(f"{ours}{kind}", f"{theirs}.{kind}", features)


def _kinds(in_features: int, has_bias: bool) -> list[tuple[str, Shape]]:
    """(weight or bias, its axes after the rows) of a linear layer."""
    return [("weight", (in_features,)), *([("bias", ())] if has_bias else [])]
