"""Use of the GPUs: model FLOP/s and their share of a peak that is known, and the reason where it is not."""

from __future__ import annotations

import pytest

from megatron_fp8.config.layout import derive_layout
from megatron_fp8.planner.throughput import gpu_called, throughput_of
from tests.small_run import VOCAB_SIZE, small_config

H100 = "NVIDIA H100 80GB HBM3; CUDA: torch.cuda and transformer_engine_torch are the real ones"


def test_model_flops_are_those_of_the_weights_and_of_causal_attention() -> None:
    config = small_config(precision={"mode": "bf16"}, parallel={"pipeline_model_parallel_size": 2})
    layout = derive_layout(config, 4, VOCAB_SIZE)
    # 4 layers, hidden 64, heads of 8, 4 query groups, SwiGLU of 128, sequence 32, vocabulary padded to 256.
    weights = 4 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128) + 64 * 256
    flops = 3 * (2 * weights + 4 * 4 * 64 * 33 / 2)
    series = throughput_of(config, layout, H100, emulated=False).series(8e6)
    assert series["tokens-per-second-per-gpu"] == 2e6
    assert series["throughput"] == pytest.approx(2e6 * flops / 1e12)
    assert series["mfu"] == pytest.approx(2e6 * flops / 989.4e12)
    # 16 samples over two copies in micro-batches of 2: 4 micro-batches through 2 stages.
    assert series["pipeline-bubble"] == pytest.approx(1 / 5)


@pytest.mark.parametrize(
    ("mode", "name", "emulated", "reason"),
    [
        ("bf16", H100, True, "the CPU emulates the formats"),
        ("fp32", H100, False, "TF32"),
        ("bf16", "NVIDIA GeForce RTX 4090", False, "no peak is known for NVIDIA GeForce RTX 4090"),
        ("bf16", "NVIDIA H200 NVL", False, "no peak is known for NVIDIA H200 NVL"),
    ],
)
def test_a_share_of_no_peak_is_withheld(mode: str, name: str, emulated: bool, reason: str) -> None:
    config = small_config(precision={"mode": mode})
    throughput = throughput_of(config, derive_layout(config, 1, VOCAB_SIZE), name, emulated)
    assert throughput.series(1e6)["mfu"] is None
    assert "withheld" in throughput.note
    assert reason in throughput.note


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA H100 PCIe", "h100-pcie-80g"),
        ("NVIDIA H100 NVL", "h100-nvl-94g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H200", "h200-141g"),
        ("NVIDIA B200", "b200-180g"),
    ],
)
def test_names_that_drivers_give(name: str, key: str) -> None:
    gpu = gpu_called(name)
    assert gpu is not None
    assert gpu.name == key
