"""What every rank of a test needs, imported once by the server that the ranks are forked from."""

import warnings

import torch

from megatron_fp8 import device

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
device.prepare()

import megatron_fp8.train.setup  # noqa: E402, F401
