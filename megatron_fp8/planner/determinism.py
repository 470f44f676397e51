"""Owns what a plan says of `training.deterministic_mode`: what it changes on a GPU, kernels of attention above all.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_fp8.config.attention import in_documents, kept_score_bytes, unfused_attention
from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.planner.gpus import Gpu
from megatron_fp8.planner.units import in_bytes


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
    unfused = unfused_attention(config, layout, gpu.attention)
    if unfused is None or not unfused.for_determinism:
        return
    if not gpu.attention.deterministic:
        lost = f"cuDNN has no deterministic backward pass for attention on the {gpu.title}"
    else:
        lost = "cuDNN's deterministic backward pass over documents kept apart would not fit"
        lost += "" if unfused.is_certain else f" with more than {in_documents(unfused.beyond)} in a micro-batch"
    yield f"  {lost}: Transformer Engine's attention is unfused then"
    kept = in_bytes(kept_score_bytes(config, layout, documents=unfused.beyond + 1))
    if unfused.is_certain:
        least = " at least" if config.data.reset_attention_mask else ""
        yield f"  and keeps {kept} of scores{least} a layer and micro-batch, which the memory above counts"
    else:
        yield f"  and keeps {kept} of scores or more a layer and micro-batch, which the memory above does not count"
