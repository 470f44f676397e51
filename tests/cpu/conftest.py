"""Kernels take tensors of the GPU: in their tests a tensor without a device is the GPU's."""

from collections.abc import Iterator

import pytest
import torch

# What tells the host from the GPU, or computes on neither.
_ON_HOST = ("casts", "collectives", "cuda", "install", "main", "malloc", "megatron", "gpu_memory", "host_and_gpu")


@pytest.fixture(autouse=True)
def factories_make_gpu_tensors(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.module.__name__.rpartition("test_")[2] in _ON_HOST:
        yield
        return
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)
