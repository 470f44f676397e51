"""One measured process: it builds one subject, then does what it is told, one command at a time."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs import OurRun, Run, repeated_batch
from benchmarks.speed.measurement import Subject
from megatron_fp8.config.load import load_config
from megatron_fp8.config.schema import Config


def serve(connection: Connection, subject: Subject, config: Path, overrides: list[str]) -> None:
    """Say how many parameters the subject has, then answer `step`, `short_step` and `profile` until nobody asks."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(subject.num_threads)
    run = build_run(subject, load_config(config, overrides).config)
    try:
        connection.send(run.num_parameters)
        while True:
            command = connection.recv()
            connection.send(profile(run) if command == "profile" else measure(run, short=command == "short_step"))
    except EOFError:
        # Everything has been measured.
        return
    finally:
        run.close()


def build_run(subject: Subject, config: Config) -> Run:
    """The subject's run in this process. Only what it needs is imported."""
    if subject.implementation == "plain":
        from benchmarks.plain_run import plain_run

        return plain_run(config, repeated_batch(config), subject.precision)
    if subject.implementation == "gemm":
        from benchmarks.speed.gemm_run import GemmRun

        return GemmRun(config, subject.precision)
    return OurRun(config, repeated_batch(config))


def measure(run: Run, *, short: bool) -> dict[str, Any]:
    """One step, and what it cost this process: a `StepSample`, CPU seconds of all threads, peak memory."""
    cpu_started = time.process_time()
    sample = run.short_step() if short else run.step()
    return {
        **asdict(sample),
        "cpu_seconds": time.process_time() - cpu_started,
        "peak_memory_bytes": run.peak_memory_bytes(),
    }


def profile(run: Run) -> list[dict[str, Any]]:
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
    return sorted(costs, key=lambda cost: -cost["seconds"])
