"""One rank of `test_megatron.py`: trains a tiny GPT of Megatron Core in several parallel layouts.

Arguments: rank, world size, rendezvous file, result file, and the layouts as JSON. But for `install()` it is
written as for GPUs.
"""
# ruff: noqa: E402  (the stand-in goes in before anything is imported that looks for it)

from __future__ import annotations

import json
import sys
import zlib
from functools import partial
from typing import Any

from megatron_fp8.cpu import install

install()

import torch
import transformer_engine.pytorch  # noqa: F401  (before Megatron Core, which looks for it)
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

VOCAB, SEQUENCE, BATCH, STEPS = 64, 16, 4, 3


def build(layout: dict[str, Any], dtype: torch.dtype) -> list[DistributedDataParallel]:
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=2,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout["tp"],
        pipeline_model_parallel_size=layout["pp"],
        virtual_pipeline_model_parallel_size=layout["vpp"],
        sequence_parallel=layout["sp"],
        hidden_dropout=layout["dropout"],
        attention_dropout=layout["dropout"],
        gradient_accumulation_fusion=False,
        overlap_p2p_comm=bool(layout["vpp"]),
        batch_p2p_comm=not layout["vpp"],
        recompute_granularity="full" if layout["recompute"] else None,
        recompute_method="uniform" if layout["recompute"] else None,
        recompute_num_layers=1 if layout["recompute"] else None,
    )
    chunks = []
    for chunk in range(layout["vpp"] or 1):
        stage = {"vp_stage": chunk if layout["vpp"] else None}
        model = GPTModel(
            config,
            get_gpt_layer_with_transformer_engine_spec(),
            VOCAB,
            SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, **stage),
            share_embeddings_and_output_weights=layout["tied"],
            **stage,
        ).cuda(torch.cuda.current_device())
        initialize(model)
        wrapped = Float16Module(config, model) if config.bf16 else model
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=layout["distributed_optimizer"],
            overlap_grad_reduce=layout["overlap"],
            grad_reduce_in_fp32=True,
        )
        chunks.append(DistributedDataParallel(config, ddp, wrapped, disable_bucketing=chunk > 0))
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    return chunks


def initialize(model: GPTModel) -> None:
    """Weights that depend on the global layer number, the name and the position only."""
    numbers = {f"decoder.layers.{i}.": layer.layer_number for i, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        for local, number in numbers.items():
            name = name.replace(local, f"layer{number}.")
        name = name.replace("output_layer.weight", "embedding.word_embeddings.weight")
        if "layernorm" in name:
            continue
        shape = list(parameter.shape)
        parallel = getattr(parameter, "tensor_model_parallel", False)
        if parallel:
            shape[parameter.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        full = torch.randn(shape, generator=generator) * 0.1
        if parallel:
            rank = parallel_state.get_tensor_model_parallel_rank()
            size = parameter.shape[parameter.partition_dim]
            full = full.narrow(parameter.partition_dim, rank * size, size)
        parameter.data.copy_(full)


def batches(step: int) -> Any:
    """This rank's micro-batches of size 1 from the same global batch in every layout."""
    tokens = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for sample in tokens[rank * BATCH // size : (rank + 1) * BATCH // size]:
        yield sample[None].cuda()


def forward_step(data: Any, model: Any) -> Any:
    tokens = next(data)
    positions = torch.arange(SEQUENCE, device="cuda")[None]
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool, device="cuda"), 1)[None, None]
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

    def loss(output: torch.Tensor, non_loss_data: bool = False) -> Any:
        mean = output.float().mean()
        # The schedule divides the first in place.
        return mean, {"loss": mean.detach().clone()}

    return output, partial(loss)


def train(layout: dict[str, Any]) -> list[list[float]]:
    parallel_state.initialize_model_parallel(layout["tp"], layout["pp"], layout["vpp"])
    tensor_parallel.model_parallel_cuda_manual_seed(123, force_reset_rng=True)
    dtype = getattr(torch, layout["dtype"])
    chunks = build(layout, dtype)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        clip_grad=0.5,
        use_distributed_optimizer=layout["distributed_optimizer"],
    )
    optimizer = get_megatron_optimizer(settings, chunks)
    curve = []
    for step in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        data = [batches(step) for _ in chunks]
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data if len(chunks) > 1 else data[0],
            model=chunks,
            num_microbatches=BATCH // parallel_state.get_data_parallel_world_size(),
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        updated, norm, _ = optimizer.step()
        assert updated
        loss = torch.stack([entry["loss"] for entry in losses]).mean() if losses else torch.zeros([], device="cuda")
        torch.distributed.all_reduce(loss)
        copies = parallel_state.get_data_parallel_world_size() * parallel_state.get_tensor_model_parallel_world_size()
        curve.append([loss.item() / copies, float(norm)])
    parallel_state.destroy_model_parallel()
    return curve


def main() -> None:
    rank, world, store, result, layouts = sys.argv[1:]
    torch.cuda.set_device(int(rank))
    torch.distributed.init_process_group("nccl", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    curves = {name: train(layout) for name, layout in json.loads(layouts).items()}
    if rank == "0":
        with open(result, "w") as file:  # noqa: PTH123
            json.dump(curves, file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
