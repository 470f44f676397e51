"""Freed memory stays in the process: counted in page faults, which do not depend on the machine's load."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

# A step's temporaries, over and over; prints the page faults of the round with the fewest: a
# kernel that takes idle memory back adds some to any. The logits alone are 16,384 pages.
PROGRAM = """
import resource
import torch
from megatron_fp8.cpu.host_memory import keep_freed_memory

def step():
    widened, result = torch.ones(2048, 2752), torch.ones(2048, 1376)
    result += widened[:, :1376]
    del widened
    logits = torch.ones(2048, 8192)

torch.set_num_threads(1)
kept = keep_freed_memory()
faults = []
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(kept, min(faults))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
@pytest.mark.parametrize(("environment", "kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_freed_memory_is_kept_unless_the_user_tunes_malloc(environment: dict[str, str], kept: bool) -> None:
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert output[0] == str(kept)
    assert (int(output[1]) < 1000) == kept
