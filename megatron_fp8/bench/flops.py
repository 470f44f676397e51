"""Owns the count of a step's GEMMs and their floating-point operations. Imports no torch."""

from megatron_fp8.config.layout import GemmShape, Layout


def step_gemms(layout: Layout, num_layers: int) -> list[tuple[GemmShape, int]]:
    """Linear layers of the model, the head included, and how often a step passes through each."""
    block = layout.gemms
    head = GemmShape("head", layout.tokens_per_microbatch, block[0].in_features, layout.padded_vocab_size)
    return [*((shape, num_layers * layout.num_microbatches) for shape in block), (head, layout.num_microbatches)]


def step_flops(layout: Layout, num_layers: int) -> int:
    """Floating-point operations of a step's GEMMs: 2 for each multiply-add, forward, dgrad and wgrad."""
    return sum(
        6 * count * shape.num_tokens * shape.in_features * shape.out_features
        for shape, count in step_gemms(layout, num_layers)
    )
