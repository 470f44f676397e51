"""Owns what a plan says of `training.deterministic_mode`: what it changes on a GPU, kernels of attention above all.

The conditions are those of Transformer Engine's `get_attention_backend` (its filter for determinism). Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.attention import is_unfused_on_gpus
from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.gpus import Gpu

# cuDNN's deterministic backward pass over packed documents would take more memory than a Hopper has.
_MOST_PAIRS_OF_PACKED_DOCUMENTS = 2**30


def deterministic_notes(config: Config, layout: Layout, gpu: Gpu) -> Iterator[str]:
    """In words; nothing without the key, and none of the costs as a number, since none was measured."""
    if not config.training.deterministic_mode:
        return
    if gpu.board is None:
        yield "deterministic: on CPUs every run is; what the key switches costs a little there"
        return
    yield (
        "deterministic: no atomic additions in attention's and the embeddings' backward passes, NCCL by its ring alone "
        "(no trees, no sums in the switches), new memory filled"
    )
    yield "  all of these take time, which was not measured and is in no number above"
    if is_unfused_on_gpus(config):
        return
    pairs = layout.micro_batch_size * layout.attention_heads_per_rank * layout.seq_length**2
    if not gpu.fuses_deterministic_attention:
        lost = f"cuDNN has no deterministic backward pass for attention on the {gpu.title}"
    elif config.data.reset_attention_mask and gpu.keeps_transposes and pairs >= _MOST_PAIRS_OF_PACKED_DOCUMENTS:
        lost = "cuDNN's deterministic backward pass over documents kept apart does not fit at these sizes"
    else:
        return
    yield f"  {lost}: Transformer Engine takes flash-attn, or without it unfused"
    yield "  attention, whose scores of s x s are in no number above"
