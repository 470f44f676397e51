"""Owns the random number streams of a rank: what dropout draws from. Weights and sample order draw from none of them.

Streams belong to a rank's coordinates: under another layout there is no meaningful way to continue them.
"""

from collections.abc import Mapping

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_fp8.parallel.groups import ParallelGroups


def stream_owner(groups: ParallelGroups) -> str:
    """The name that this rank's streams are saved under."""
    places = (("tp", groups.tp), ("pp", groups.pp), ("dp", groups.dp))
    return ".".join(f"{name}{group.rank()}of{group.size()}" for name, group in places)


def read_streams(device: torch.device) -> dict[str, Tensor]:
    """States, uint8 on the CPU: torch's own generators and those of Megatron's tracker."""
    states = {"host": torch.get_rng_state(), "device": torch.get_device_module(device).get_rng_state()}
    for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        states[f"tracker.{name}"] = state
    return {name: state.cpu() for name, state in states.items()}


def write_streams(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Put back what `read_streams` gave."""
    torch.set_rng_state(states["host"])
    # Checkpoints of earlier versions on CPUs had one stream for both.
    torch.get_device_module(device).set_rng_state(states.get("device", states["host"]))
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states({name: states[f"tracker.{name}"] for name in tracker.get_states()})
