"""Owns the warning of a job whose environment lacks what its layout needs on these GPUs."""

import sys
from collections.abc import Mapping

from megatron_fp8.config.environment import unmet_needs
from megatron_fp8.config.schema import Config
from megatron_fp8.device import Device


def warn_of_unmet_needs(config: Config, device: Device, environ: Mapping[str, str], rank: int) -> None:
    """On rank 0 of a job on GPUs: each variable that is missing, on standard error. Nothing is slower without on CPUs.

    Later than the check of the config, since which GPUs there are is known here only.
    """
    if rank != 0 or device.emulated:
        return
    for problem in unmet_needs(config.parallel, environ, device.compute_capability()):
        print(f"warning: {problem}", file=sys.stderr, flush=True)
