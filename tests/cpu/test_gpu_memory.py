"""`torch.cuda`'s memory figures: bytes of the emulated GPU's tensors, each storage once. In processes of their own."""

from __future__ import annotations

import subprocess
import sys

FIGURES = """
from megatron_fp8.cpu import install
install()
import torch
from torch.nn import functional as F

allocated, peak = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
assert allocated() == 0
host = torch.ones(1 << 20)
assert allocated() == 0
x = torch.empty(1 << 20, device="cuda")
assert allocated() == 4194304
views = [x.view(-1, 2), x[5:], x.detach()]
assert allocated() == 4194304
small = torch.ones(3, device="cuda")
assert allocated() == 4194304 + 512
moved = host.cuda()
assert allocated() == 2 * 4194304 + 512
back = moved.cpu() + host
assert allocated() == 2 * 4194304 + 512
del moved, small
assert allocated() == 4194304
y = x * 2
assert allocated() == 2 * 4194304
del x
assert allocated() == 2 * 4194304
del views
assert allocated() == 4194304
assert peak() == 2 * 4194304 + 512
torch.cuda.reset_peak_memory_stats()
assert peak() == allocated() == torch.cuda.memory_stats()["allocated_bytes.all.current"]
y.untyped_storage().resize_(0)
assert allocated() == 0
del y

# What autograd keeps, and what it makes in C++.
leaf = torch.ones(1 << 20, device="cuda", requires_grad=True)
held = leaf.exp().exp()
assert allocated() == 3 * 4194304
torch.cuda.reset_peak_memory_stats()
held.sum().backward()
del held
assert allocated() == 2 * 4194304
assert peak() > 4 * 4194304
del leaf
assert allocated() == 0
"""


def test_memory_is_that_of_gpu_tensors() -> None:
    ended = subprocess.run([sys.executable, "-c", FIGURES], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr


EARLIER = """
from megatron_fp8.cpu import install
install()
import torch
x = torch.empty(1 << 20, device="cuda")
y = torch.nn.Parameter(x * 2)
host = torch.ones(7)
assert torch.cuda.memory_allocated() == 2 * 4194304
del x
assert torch.cuda.memory_allocated() == 4194304
"""


def test_tensors_from_before_the_first_question_count() -> None:
    ended = subprocess.run([sys.executable, "-c", EARLIER], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
