"""What every test runs on: the CPU stand-in, in place before a test module imports Transformer Engine, and one thread.

One thread because the tests' tensors are small and several test processes may share the machine.
"""

import sys
from pathlib import Path

import torch

from megatron_fp8.cpu import install

# For `benchmarks`. Last: the library lm_eval has the name of a script there.
sys.path.append(str(Path(__file__).parent.parent / "tools"))
torch.set_num_threads(1)
install()
