"""Owns one measured process: `python -m benchmarks.speed.worker`, started by `bench/processes.py`, under torchrun
where the subject has several ranks. It builds one subject, then does what it is told, one command at a time.

Must not know of other subjects or of what is done with the numbers.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.channel import Channel
from benchmarks.speed.work import Run
from megatron_fp8.config.load import load_config
from megatron_fp8.config.schema import Config
from megatron_fp8.parallel.process_group import global_rank


def build_run(implementation: str, precision: str, config: Config) -> Run:
    """The subject's run in this process. Only what it needs is imported."""
    if implementation == "plain":
        from benchmarks.speed.plain_run import PlainRun

        return PlainRun(config, precision)
    if implementation == "gemm":
        from benchmarks.speed.gemm_run import GemmRun

        return GemmRun(config, precision)
    from benchmarks.speed.our_run import OurRun

    return OurRun(config)


def measure(run: Run, *, short: bool) -> dict[str, Any]:
    """One step, and what it cost this process: a `StepSample`, CPU seconds of all threads, peak memory."""
    cpu_started = time.process_time()
    sample = run.short_step() if short else run.step()
    return {
        **asdict(sample),
        "cpu_seconds": time.process_time() - cpu_started,
        "peak_memory_bytes": run.peak_memory_bytes(),
    }


def profile(run: Run) -> dict[str, Any]:
    """The operations of one step that took the most time by themselves: name, seconds, calls; largest first."""
    with torch.profiler.profile(acc_events=True) as profiler:
        run.step()
    averages = profiler.key_averages()
    on_device = any(event.self_device_time_total for event in averages)
    costs = [
        {
            "name": event.key,
            "seconds": (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6,
            "num_calls": event.count,
        }
        for event in averages
    ]
    return {"costs": sorted(costs, key=lambda cost: -cost["seconds"])}


def serve(run: Run, channel: Channel) -> None:
    """Do what the other side asks for until it says `stop`."""
    channel.send({"rank": global_rank(), "num_parameters": run.num_parameters})
    while True:
        command = channel.receive()["command"]
        if command == "stop":
            return
        if command == "profile":
            channel.send(profile(run))
        elif command in ("step", "short_step"):
            channel.send(measure(run, short=command == "short_step"))
        else:
            raise ValueError(f"unknown command {command!r}")


def main() -> None:
    """Build the subject that the command line names, and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", type=Path, required=True, help="socket to report to")
    parser.add_argument("--implementation", required=True, choices=("ours", "plain", "gemm"))
    parser.add_argument("--precision", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    settings = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(settings.threads)
    config = load_config(settings.config, settings.overrides).config
    run = build_run(settings.implementation, settings.precision, config)
    channel = Channel.connect(settings.address)
    try:
        serve(run, channel)
    finally:
        run.close()
        channel.close()


if __name__ == "__main__":
    main()
