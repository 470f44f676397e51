"""FP8 training with Transformer Engine: which layers compute in FP8, and when their scales move.

A linear layer multiplies three times per step: `fprop` (output = input x weight), `dgrad` (input gradient = output
gradient x weight) and `wgrad` (weight gradient = output gradient x input). In FP8 the two operands of each GEMM are
cast first, each multiplied by its own scale, and the product is divided by both scales. Input and weight are E4M3, the
output gradient is E5M2 (`hybrid`). Accumulation and results are not FP8; neither are master weights, optimizer state,
norms and attention.

Under delayed scaling a tensor's scale is FP8 maximum / amax / 2^margin, with the largest amax of the last steps. Each
step casts with the scales that earlier steps left, and records the amaxes of its own tensors. Scales move once per
optimizer step, from the maximum over its micro-batches and over the ranks of the amax group; a skipped step moves
nothing. The other recipes compute scales from each tensor and keep no state.

    policy = build_policy(PrecisionConfig(mode="fp8", fp8_amax_history_len=16), num_layers=len(layers))
    precision = PrecisionManager(policy, amax_group=None, device=torch.device("cuda"))
    precision.attach(dict(enumerate(layers)))  # Transformer Engine modules, or modules that contain some

    for batch in batches:
        with precision.training_step():
            for number, layer in enumerate(layers):
                with precision.region(number):
                    batch = layer(batch)
            batch.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        precision.finish_step()

On a machine without CUDA, call `megatron_fp8.cpu.install()` first. `docs/api.md` has a whole program, with evaluation
and a checkpoint of the FP8 state.
"""

from typing import TYPE_CHECKING, Any

from megatron_fp8.config.schema_model import PrecisionConfig
from megatron_fp8.precision.policy import PrecisionPolicy, build_policy

if TYPE_CHECKING:
    from megatron_fp8.precision.manager import PrecisionManager

__all__ = ["PrecisionConfig", "PrecisionManager", "PrecisionPolicy", "build_policy"]


def __getattr__(name: str) -> Any:
    # Not imported above: the policy is read where torch cannot be imported.
    if name == "PrecisionManager":
        from megatron_fp8.precision.manager import PrecisionManager

        return PrecisionManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
