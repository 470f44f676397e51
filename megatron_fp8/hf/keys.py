"""The kinds of keys that a `config.json` has, each in both directions. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_fp8.config.layout import head_size, mlp_size, query_groups
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.hf.mapping import HFSettings

# Theirs -> ours. Transformer Engine's GELU is the approximation by tanh.
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "gelu": "exact_geglu",
         "relu": "reglu"}  # fmt: skip
PLAIN = {"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu": "exact_gelu", "relu": "relu",
         "relu2": "srelu", "silu": "silu", "swish": "silu", "quick_gelu": "qgelu"}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """One key that is one of ours; `default`: theirs, where the key is missing, or null unless that is a value."""

    theirs: str
    ours: str
    default: Any = None
    nullable: bool = False

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        read = settings.unless_missing if self.nullable else settings.get
        return {self.ours: read(self.theirs, self.default)}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        return {self.theirs: getattr(model, self.ours)}


@dataclass(frozen=True)
class Size:
    """A positive integer; required without a `default`. `derived`: ours where it is null."""

    theirs: str
    ours: str
    default: int | None = None
    derived: Callable[[ModelConfig], int] | None = None

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        return {self.ours: settings.size(self.theirs, self.default)}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        return {self.theirs: self.derived(model) if self.derived else getattr(model, self.ours)}


@dataclass(frozen=True)
class Choice:
    """A key whose values have other names here; of several names of one thing the default is written, or the first."""

    theirs: str
    ours: str
    choices: Mapping[str, Any]
    default: str

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        value = settings.get(self.theirs, self.default)
        if isinstance(value, str) and value in self.choices:
            return {self.ours: self.choices[value]}
        settings.reject(self.theirs, value, "it is not supported", f"a model with one of {', '.join(self.choices)}")
        return {}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        names = [theirs for theirs, ours in self.choices.items() if ours == getattr(model, self.ours)]
        return {self.theirs: self.default if self.default in names or not names else names[0]}


@dataclass(frozen=True)
class Fixed:
    """Values of ours that the family's class has built in."""

    ours: Mapping[str, Any]

    def read(self, settings: HFSettings) -> Mapping[str, Any]:  # noqa: ARG002
        return self.ours

    def write(self, model: ModelConfig) -> Mapping[str, Any]:  # noqa: ARG002
        return {}


@dataclass(frozen=True)
class Only:
    """Keys of which one value is supported, which is also what a missing key means."""

    theirs: Mapping[str, Any]
    reason: str = "it is not supported"

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        for key, wanted in self.theirs.items():
            if (value := settings.get(key, wanted)) != wanted:
                settings.reject(key, value, self.reason, f"a model with {key}={wanted!r}")
        return {}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:  # noqa: ARG002
        return {}


@dataclass(frozen=True)
class Heads:
    """Heads, groups and their size. `head_dim` "": the class computes it from the others."""

    hidden: str = "hidden_size"
    heads: str = "num_attention_heads"
    groups: str = "num_key_value_heads"
    head_dim: str = "head_dim"
    default_head_dim: int | None = None
    default_groups: int | None = None
    # The class refuses a width that is not divisible by the heads, whatever their size.
    divides: bool = False

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        hidden, heads = settings.size(self.hidden), settings.size(self.heads)
        if (self.divides or not self.head_dim) and hidden % heads:
            reason = f"not divisible by {self.heads}={heads}, and the class in transformers refuses that"
            settings.reject(self.hidden, hidden, reason, "a multiple of it, or a class that takes any head_dim")
        size = self.default_head_dim or max(hidden // heads, 1)
        return {
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": self._groups(settings, heads),
            "kv_channels": settings.size(self.head_dim, size) if self.head_dim else size,
        }

    def _groups(self, settings: HFSettings, heads: int) -> int:
        if not self.groups:
            return heads
        value = settings.unless_missing(self.groups, self.default_groups or heads)
        return heads if value is None else settings.size(self.groups, self.default_groups or heads)

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        theirs = {self.hidden: model.hidden_size, self.heads: model.num_attention_heads}
        theirs |= {self.groups: query_groups(model)} if self.groups else {}
        usual = not self.default_head_dim and head_size(model) * model.num_attention_heads == model.hidden_size
        return theirs | ({self.head_dim: head_size(model)} if self.head_dim and not usual else {})


@dataclass(frozen=True)
class Biases:
    """Biases: `qkv`, `proj`, `mlp` are the key that says whether they are there, or true or false."""

    qkv: str | bool
    proj: str | bool
    mlp: str | bool
    defaults: Mapping[str, bool] = field(default_factory=dict)

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        qkv, proj, mlp = (
            settings.flag(key, self.defaults.get(key, False)) if isinstance(key, str) else key
            for key in (self.qkv, self.proj, self.mlp)
        )
        return {
            "add_bias_linear": proj,
            "add_qkv_bias": None if qkv == proj else qkv,
            "add_mlp_bias": None if mlp == proj else mlp,
        }

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        ours = (
            (self.qkv, model.add_qkv_bias),
            (self.proj, model.add_bias_linear),
            (self.mlp, model.add_mlp_bias),
        )
        return {key: model.add_bias_linear if value is None else value for key, value in ours if isinstance(key, str)}


@dataclass(frozen=True)
class Tied:
    """Whether the head is the embedding."""

    default: bool = False

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        return {"untie_embeddings_and_output_weights": not settings.flag("tie_word_embeddings", self.default)}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        return {"tie_word_embeddings": not model.untie_embeddings_and_output_weights}


@dataclass(frozen=True)
class Dropout:
    """Several keys that are `hidden_dropout` here, of which the first counts; ours is written to all."""

    keys: tuple[str, ...]
    default: float = 0.0

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        first, *others = ((key, settings.get(key, self.default)) for key in self.keys)
        for key, value in others:
            if value != first[1]:
                settings.notes.append(f"{key}={value} is left out: model.hidden_dropout is {first[0]}={first[1]}")
        return {"hidden_dropout": first[1]}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        return dict.fromkeys(self.keys, model.hidden_dropout)


@dataclass(frozen=True)
class MlpOfWidth:
    """The MLP's inner width, 4 times that of the residual stream where it is missing or null."""

    theirs: str
    hidden: str

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        return {"ffn_hidden_size": settings.size(self.theirs, 4 * settings.size(self.hidden))}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        return {self.theirs: mlp_size(model)}


@dataclass(frozen=True)
class QkNorm:
    """Whether queries and keys of each head are normalized."""

    theirs: str

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        return {"qk_layernorm": "per_head" if settings.flag(self.theirs, False) else "none"}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        return {self.theirs: model.qk_layernorm != "none"}


def common_keys(positions: int, heads: Heads | None = None, tied: bool = False, std: float = 0.02) -> tuple[Any, ...]:
    """The keys that most families have, by their usual names; `positions`: the default of the longest sequence."""
    return (
        Size("num_hidden_layers", "num_layers"),
        heads or Heads(),
        positions_key("max_position_embeddings", positions),
        Value("initializer_range", "init_method_std", std),
        Value("attention_dropout", "attention_dropout", 0.0),
        Size("vocab_size", "vocab_size"),
        Tied(tied),
        Only(NEUTRAL),
    )


def mlp_key(theirs: str = "intermediate_size") -> Size:
    """The MLP's inner width."""
    return Size(theirs, "ffn_hidden_size", None, mlp_size)


def positions_key(theirs: str, default: int) -> Size:
    """The longest sequence."""
    return Size(
        theirs, "max_position_embeddings", default, lambda model: model.max_position_embeddings or model.seq_length
    )


# Keys of every class, by what they are in a decoder of text that is neither quantized nor pruned.
NEUTRAL: Mapping[str, Any] = {
    "quantization_config": None,
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    "use_bfloat16": False,
    "use_bidirectional_attention": False,
}
