"""Owns the first layer of the first stage: token and position embeddings, divided along the sequence if asked.

Must not know pipeline stages or formats.
"""

from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class Embedding(nn.Module):
    """Vocabulary-parallel word embedding, plus a learned position table if `num_positions` is given."""

    def __init__(
        self, config: TransformerConfig, padded_vocab_size: int, num_positions: int | None, tp: ProcessGroup
    ) -> None:
        super().__init__()
        self._sequence_parallel = config.sequence_parallel
        self._deterministic = config.deterministic_mode
        self._tp = tp
        self.word_embeddings = tensor_parallel.VocabParallelEmbedding(
            padded_vocab_size, config.hidden_size, init_method=config.init_method, config=config, tp_group=tp
        )
        self.position_embeddings: nn.Embedding | None = None
        if num_positions is not None:
            weight = self.word_embeddings.weight
            self.position_embeddings = nn.Embedding(
                num_positions, config.hidden_size, device=weight.device, dtype=weight.dtype
            )
        self._dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """Embed `tokens` `[b, s]`; returns `[s, b, h]`, or `[s / tp, b, h]` with sequence parallelism."""
        hidden = self.word_embeddings(tokens)
        if self.position_embeddings is not None:
            table = self.position_embeddings
            # As Megatron's word embedding does; torch makes the backward pass of indexing one of a fixed order.
            hidden = hidden + (table.weight[position_ids] if self._deterministic else table(position_ids))
        hidden = hidden.transpose(0, 1).contiguous()
        if not self._sequence_parallel:
            return self._dropout(hidden)
        hidden = tensor_parallel.scatter_to_sequence_parallel_region(hidden, group=self._tp)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return self._dropout(hidden)
