"""Models that generate: trained for a moment on real ranks, saved, and asked on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_fp8.checkpoint.saved_model import InferenceSettings, read_saved_model

VOCAB_SIZE, SEQ_LENGTH = 300, 32
SHAPE = {"num_layers": 2, "seq_length": SEQ_LENGTH, "vocab_size": VOCAB_SIZE}
GPT2 = {
    **SHAPE,
    "num_query_groups": 8,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "activation": "gelu",
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
# The first in FP8 on two ranks, the other in BF16 with dropout, which must not be there any more.
SECTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (
        2,
        {
            "model": SHAPE,
            "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            "precision": {"mode": "fp8", "fp8_amax_history_len": 4},
        },
    ),
    "gpt2": (1, {"model": GPT2, "precision": {"mode": "bf16"}}),
}


def continuations(
    path: Path, prompts: list[list[int]], asked: list[dict[str, Any]], settings: InferenceSettings | None = None
) -> list[list[Any]]:
    """What `generate` answers to each of `asked`, its keyword arguments, in the running world.

    Greedy, ten tokens at most, unless asked otherwise.
    """
    import torch
    from megatron.core import parallel_state

    from megatron_fp8 import device as devices
    from megatron_fp8.generate.generation import Limits, Sampling, generate
    from megatron_fp8.generate.loaded_model import load_model

    world_size = torch.distributed.get_world_size()
    settings = settings or InferenceSettings(world_size, mode="fp32")
    model = load_model(read_saved_model(path, settings, world_size), devices.prepare())
    usual = {"prompts": prompts, "limits": Limits(10), "sampling": Sampling(greedy=True), "seed": 0}
    answers = [generate(model, **{**usual, **arguments}) for arguments in asked]
    parallel_state.destroy_model_parallel()
    return answers


def state_after_an_exception(path: Path, prompt: list[int]) -> tuple[list[bool], list[bool]]:
    """What generation changes for a while, before a call that raises in the middle and after it: whether the next
    forward pass quantizes weights, and whether gradients are computed."""
    import torch
    from megatron.core import parallel_state

    from megatron_fp8 import device as devices
    from megatron_fp8.generate.generation import Limits, Sampling, generate
    from megatron_fp8.generate.loaded_model import load_model

    model = load_model(read_saved_model(path, InferenceSettings(), 1), devices.prepare())

    def state() -> list[bool]:
        return [model.stages[0].is_first_microbatch, torch.is_grad_enabled()]

    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    before = state()
    try:
        generate(model, [prompt], Limits(10), Sampling(greedy=True), 0, stop)
    except KeyboardInterrupt:
        return before, state()
    finally:
        parallel_state.destroy_model_parallel()
    raise AssertionError("the callback was not called")
