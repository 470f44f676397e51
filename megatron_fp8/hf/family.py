"""What a family of models is: the keys of its `config.json`, and the names of its tensors. Imports no torch.

A key knows both directions. Whether a family can hold a model of ours is not written down twice: the model is written
as `config.json`, read again, and must be the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.hf.mapping import HFSettings, TensorGroup
from megatron_fp8.hf.same_model import differing_keys
from megatron_fp8.hf.tensor_names import TensorNames, tensor_groups

# What `transformers` keeps in a `config.json` that changes nothing about the model: who wrote it and in which format,
# ids of tokens (the tokenizer's and generation's matter), how generation goes, and what heads for other tasks need.
HARMLESS = frozenset(
    {
        *("architectures", "auto_map", "model_type", "transformers_version", "_name_or_path", "dtype", "torch_dtype"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "return_dict_in_generate"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "classifier_dropout"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "torchscript"),
        *("cache_implementation", "suppress_tokens"),
        *("temperature", "top_k", "top_p", "do_sample", "max_length", "min_length", "repetition_penalty", "num_beams"),
        *("tokenizer_class", "prefix", "task_specific_params", "output_scores", "remove_invalid_values"),
        # Of an implementation, not of the model: how weights were sharded, or how a kernel is chosen.
        *("pretraining_tp", "use_flash_attn", "flash_attn", "fused_bias_fc", "fused_dense", "gradient_checkpointing"),
    }
)  # fmt: skip


class Key(Protocol):
    """One or several keys of a `config.json`, and what they are in the `model` section."""

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        """Values of ours; mistakes go into `settings`."""

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        """Values of theirs; of a model that the family cannot hold, the nearest."""


@dataclass(frozen=True)
class Family:
    """A class of models of `transformers`.

    `names`: of its tensors, or how a model's follow from its form. `examples`: models that
    people know it by. `harmless`: more keys that change nothing.
    """

    model_type: str
    architecture: str
    keys: tuple[Key, ...]
    examples: str
    names: TensorNames | Callable[[ModelConfig], TensorNames] = field(default_factory=TensorNames)
    harmless: frozenset[str] = frozenset()

    def tensor_groups(self, model: ModelConfig, vocab_size: int) -> Iterator[TensorGroup]:
        """All tensors of a model, ours beside theirs, in forward order."""
        return tensor_groups(model, self._names(model), vocab_size)

    def tied_head(self, model: ModelConfig) -> str | None:
        """The name under which files may hold the embedding once more, or alone; None where the head is its own."""
        return None if model.untie_embeddings_and_output_weights else f"{self._names(model).head}.weight"

    def _names(self, model: ModelConfig) -> TensorNames:
        return self.names(model) if callable(self.names) else self.names

    def values(self, settings: HFSettings) -> dict[str, Any]:
        """The `model` section for a `config.json`, without `seq_length`; `settings` collects mistakes."""
        ours: dict[str, Any] = {"hf_model_type": self.model_type}
        for key in self.keys:
            ours |= key.read(settings)
        settings.reject_unread(HARMLESS | self.harmless)
        return ours

    def config_json(self, model: ModelConfig, vocab_size: int) -> dict[str, Any]:
        """The `config.json` of a model that the family can hold."""
        theirs: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
        # Without a tokenizer no id is known; the defaults of a class may be outside the vocabulary.
        theirs |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        for key in self.keys:
            theirs |= key.write(model)
        return {**theirs, "vocab_size": vocab_size}

    def problems(self, model: ModelConfig) -> Iterator[Problem]:
        """Every value of a model that the family cannot hold."""
        settings = HFSettings(self.config_json(model, model.vocab_size or 1), self.architecture)
        ours = self.values(settings)
        yield from settings.problems
        if settings.problems:
            return
        again = ModelConfig.model_validate({**ours, "seq_length": model.seq_length})
        for key, value, theirs in differing_keys(model, again):
            reason = f"{self.architecture} cannot express it"
            yield Problem(f"model.{key}", value, reason, f"a model trained with model.{key}={theirs}")
