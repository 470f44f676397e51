"""One pipeline stage of the GPT model: what it computes, and what Megatron's schedules ask of a model.

Must not know how stages are wired together, optimizers, or which number formats exist: the precision manager says
in which region each layer runs.
"""

from dataclasses import dataclass

import torch
import transformer_engine.pytorch as te
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn
from transformer_engine.pytorch.attention import InferenceParams

from megatron_fp8.config.layer_kinds import has_rope, uses_local_rope
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.model.layers import Embedding, LayerFactory, attention_arguments, set_qkv_format
from megatron_fp8.model.rotary import rotary_embedding
from megatron_fp8.precision.manager import PrecisionManager


@dataclass(frozen=True)
class StageSpec:
    """Which part of the model a stage is.

    `first_layer`: global number of its first layer, from 0. `vp_stage`: its number among the rank's model chunks,
    None without interleaving. `pre_process`/`post_process`: it holds the embedding / final norm, head and loss.
    """

    first_layer: int
    num_layers: int
    pre_process: bool
    post_process: bool
    vp_stage: int | None


class GPTStage(MegatronModule):  # type: ignore[misc]
    """Embedding, TE `TransformerLayer`s, final norm, head and loss, as far as they belong to the stage."""

    def __init__(
        self,
        spec: StageSpec,
        model: ModelConfig,
        config: TransformerConfig,
        factory: LayerFactory,
        precision: PrecisionManager,
        vocab_size: int,
        padded_vocab_size: int,
    ) -> None:
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder
        self.spec = spec
        self.vp_stage = spec.vp_stage
        self.pre_process = spec.pre_process
        self.post_process = spec.post_process
        self.share_embeddings_and_output_weights = not model.untie_embeddings_and_output_weights
        self.is_first_microbatch = True
        self.input_tensor: Tensor | None = None
        self._precision = precision
        self._factory = factory
        self._vocab_size = vocab_size
        self._recompute = factory.num_recomputed(spec.num_layers)

        # The last stage needs the tied embedding's weight too: it holds a copy whose gradients Megatron adds up.
        ties_here = self.share_embeddings_and_output_weights and spec.post_process
        if spec.pre_process or ties_here:
            positions = None
            if model.position_embedding_type == "learned_absolute" and spec.pre_process:
                positions = model.max_position_embeddings or model.seq_length
            self.embedding = Embedding(config, padded_vocab_size, positions, factory.tp, model.embedding_multiplier)
        self._rotary = [rotary_embedding(model)] if model.position_embedding_type == "rope" else []
        if model.rotary_base_local is not None:
            self._rotary.append(rotary_embedding(model, local=True))
        numbers = range(spec.first_layer, spec.first_layer + spec.num_layers)
        # Which of them each layer has; None: no RoPE.
        self._rotary_of = [int(uses_local_rope(model, n)) if has_rope(model, n) else None for n in numbers]
        self.layers = nn.ModuleList(self._make_layer(spec.first_layer + i) for i in range(spec.num_layers))
        if spec.post_process:
            self.final_norm = factory.final_norm()
            self.output_layer = factory.output_layer(padded_vocab_size)
            if self.share_embeddings_and_output_weights:
                self.output_layer.weight = self.embedding.word_embeddings.weight
        self._mark_tied_weight()

    def _make_layer(self, number: int) -> nn.Module:
        with self._precision.building(number):
            layer: nn.Module = self._factory.layer(number)
        return layer

    def _mark_tied_weight(self) -> None:
        """Set the marks by which Megatron adds up the copies' gradients and counts them once in the norm."""
        if not self.share_embeddings_and_output_weights or not (self.pre_process or self.post_process):
            return
        weight = self.shared_embedding_or_output_weight()
        weight.shared_embedding = True  # type: ignore[attr-defined]
        weight.zero_out_wgrad = self.pre_process and self.post_process  # type: ignore[attr-defined]
        if not self.pre_process:
            weight.shared = True  # type: ignore[attr-defined]

    def shared_embedding_or_output_weight(self) -> Tensor:
        """The tied weight `[padded_vocab / tp, h]`; Megatron's gradient finalization asks for it."""
        weight: Tensor = self.embedding.word_embeddings.weight
        return weight

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Take the previous stage's output `[s (/ tp), b, h]`; Megatron's schedules call this."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Run the stage.

        `tokens`, `position_ids`, `labels`: int64 `[b, s]`, read by the stages that need them. `cu_seqlens`, int32
        `[n + 1]`: where the documents begin and end that attention keeps apart, samples one after another; None: each
        sample is one. Returns hidden states `[s (/ tp), b, h]`; from the last stage per-token losses `[b, s]`, or
        without labels the logits `[s, b, padded_vocab / tp]`, both FP32.
        """
        if cu_seqlens is None:
            return self._run(tokens, position_ids, labels, None, tokens.shape[1])
        b, s = tokens.shape
        # As one sample of b s tokens: to the blocks a document is a range of rows. Only attention goes by these.
        row = None if labels is None else labels.reshape(1, -1)
        output = self._run(tokens.reshape(1, -1), position_ids.reshape(1, -1), row, cu_seqlens, s)
        if not self.post_process:
            # Of the shape that the schedule has agreed on with the next stage, which may free it: not a view.
            shaped = output.view(-1, b, output.shape[-1])
            viewless: Tensor = make_viewless_tensor(shaped, requires_grad=output.requires_grad, keep_graph=True)
            return viewless
        return output.view(b, s) if labels is not None else output.view(b, s, -1).transpose(0, 1)

    def _run(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        labels: Tensor | None,
        cu_seqlens: Tensor | None,
        longest: int,
    ) -> Tensor:
        """`forward` without a thought of shapes; with `cu_seqlens` hidden states are `[t (/ tp), h]`, t = b s."""
        hidden = self.embedding(tokens, position_ids) if self.pre_process else self._received()
        if cu_seqlens is not None:
            hidden = hidden.flatten(0, 1)
        hidden = self._blocks(hidden, cu_seqlens, longest)
        if not self.post_process:
            return hidden
        if cu_seqlens is not None:
            hidden = hidden.unsqueeze(1)
        logits = self._logits(hidden)
        if labels is None:
            return logits
        losses: Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous())
        return losses.transpose(0, 1).contiguous()

    def _received(self) -> Tensor:
        if self.input_tensor is None:
            raise RuntimeError("a stage without the embedding ran before set_input_tensor gave it its input")
        return self.input_tensor

    def next_token_logits(
        self, tokens: Tensor, position_ids: Tensor, last: Tensor, cache: InferenceParams | None
    ) -> Tensor:
        """FP32 logits `[b, padded_vocab / tp]` of the token after place `last` of each sample; of a model of one stage.

        `tokens`, `position_ids`: int64 `[b, s]`; what comes after `last`, int64 `[b]`, only fills up. With `cache`,
        whose step is prepared, the tokens come after those that it holds, and FP8 weights are quantized in the first
        such call after `is_first_microbatch` was set, and kept.
        """
        hidden = self._blocks(self.embedding(tokens, position_ids), None, tokens.shape[1], cache)
        hidden = hidden[last, torch.arange(len(last), device=last.device)].unsqueeze(0)
        return self._logits(hidden).squeeze(0)

    def _logits(self, hidden: Tensor) -> Tensor:
        """FP32 `[s, b, padded_vocab / tp]`, scaled and capped."""
        model = self._factory.model
        # A copy of its own: the cross entropy works in place on what is FP32 already.
        logits: Tensor = self.output_layer(self.final_norm(hidden)).to(torch.float32, copy=True)
        if model.logits_scaling != 1.0:
            logits = logits / model.logits_scaling
        if (cap := model.final_logit_softcapping) is not None:
            logits = cap * torch.tanh(logits / cap)
        self._mask_padded_vocab(logits)
        return logits

    def _angles(self, longest: int) -> list[Tensor | None]:
        """RoPE's angles for each of the stage's layers; None: it has no RoPE."""
        tables = [rotary(max(self._factory.seq_length, longest)) for rotary in self._rotary]
        return [None if table is None else tables[table] for table in self._rotary_of]

    def _blocks(
        self, hidden: Tensor, cu_seqlens: Tensor | None, longest: int, cache: InferenceParams | None = None
    ) -> Tensor:
        angles = self._angles(longest)
        attention = attention_arguments(cu_seqlens, longest, cache)
        for index, layer in enumerate(self.layers):
            number = self.spec.first_layer + index
            # In evaluation the weights are quantized anew and the cache of the training step is left alone.
            caches = self._precision.runs_in_fp8(number) and (torch.is_grad_enabled() or cache is not None)
            first = self.is_first_microbatch if caches else None
            set_qkv_format(layer, packed=cu_seqlens is not None)
            with self._precision.region(number):
                if index < self._recompute and torch.is_grad_enabled():
                    hidden = te.checkpoint(
                        layer,
                        hidden,
                        is_first_microbatch=first,
                        rotary_pos_emb=angles[index],
                        **attention,
                        get_rng_state_tracker=tensor_parallel.get_cuda_rng_tracker,
                        tp_group=self._factory.tp,
                    )
                else:
                    hidden = layer(hidden, is_first_microbatch=first, rotary_pos_emb=angles[index], **attention)
        self.is_first_microbatch = False
        return hidden

    def _mask_padded_vocab(self, logits: Tensor) -> None:
        """Take padded vocabulary entries out of the softmax; their gradient is then exactly 0."""
        local = logits.shape[-1]
        first_padded = self._vocab_size - self._factory.tp.rank() * local
        if first_padded < local:
            # `.data`: autograd must not see this; nobody saved the logits, and their gradient there is 0 anyway.
            logits.data[..., max(first_padded, 0) :] = float("-inf")
