"""Owns the building of what the loop runs on: groups, seeds, precision, model, optimizer, schedule.

Imports Transformer Engine and Megatron Core, so `device.prepare()` comes first.
"""

from pathlib import Path

import torch

from megatron_fp8.checkpoint.contents import model_places
from megatron_fp8.checkpoint.live import LiveState
from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.device import Device
from megatron_fp8.model.build import build_model
from megatron_fp8.optim.build import build_optimizer, build_schedule
from megatron_fp8.parallel.groups import amax_group, build_groups, seed_ranks
from megatron_fp8.precision.manager import PrecisionManager
from megatron_fp8.precision.policy import build_policy
from megatron_fp8.report.record import Recorder
from megatron_fp8.train.checkpointing import Checkpointer
from megatron_fp8.train.health import HealthWatch
from megatron_fp8.train.node_watch import NodeWatch
from megatron_fp8.train.norms import NormWatch
from megatron_fp8.train.parts import TrainingParts
from megatron_fp8.train.profile import StepProfiler
from megatron_fp8.train.replica_check import ReplicaCheck
from megatron_fp8.train.slow_ranks import SlowRankWatch, mark_own_work
from megatron_fp8.train.step import Stepper
from megatron_fp8.train.step_times import StepTimes


def build_parts(
    config: Config,
    layout: Layout,
    vocab_size: int,
    device: Device,
    recorder: Recorder,
    checkpoints: Path | None = None,
    profiles: Path | None = None,
) -> TrainingParts:
    """Build this rank's share; collective over all ranks, the process group must be running.

    `checkpoints`, `profiles`: the directories that these are written into; None: none are.
    """
    if config.training.deterministic_mode:
        # Also for Transformer Engine, which asks torch.
        torch.use_deterministic_algorithms(True)
    groups = build_groups(config.parallel)
    seed_ranks(config.training.seed, groups)
    policy = build_policy(config.precision, config.model.num_layers)
    precision = PrecisionManager(
        policy,
        amax_group(config.precision.amax_reduction, groups),
        device.torch_device,
        rank_name=".".join(f"{n}{g.rank()}of{g.size()}" for n, g in (("tp", groups.tp), ("dp", groups.dp))),
    )
    chunks = build_model(config, layout, vocab_size, groups, precision, device.torch_device)
    optimizer = build_optimizer(config, chunks, precision.policy)
    times = StepTimes(device)
    optimizer.config.timers = times
    optimizer.config.barrier_with_L1_time = False
    mark_own_work(chunks, times, groups.tp.size())
    schedule = build_schedule(config, optimizer)
    health = HealthWatch(precision, groups, recorder, config.logging.log_interval)
    places = model_places(chunks, layout, config.model.activation, groups, config.parallel.use_distributed_optimizer)
    interval = config.logging.norms_interval
    norms = NormWatch(
        optimizer,
        places,
        config.model.num_layers,
        device.torch_device,
        recorder,
        config.logging.log_interval if interval is None else interval,
    )
    live = LiveState(chunks, optimizer, schedule, precision, places, device.torch_device)
    return TrainingParts(
        config=config,
        layout=layout,
        device=device,
        groups=groups,
        chunks=chunks,
        optimizer=optimizer,
        schedule=schedule,
        precision=precision,
        stepper=Stepper(chunks, groups, precision, device.torch_device, times),
        health=health,
        checkpointer=Checkpointer(config, layout, checkpoints, live, health, recorder),
        times=times,
        slow_ranks=SlowRankWatch(config, groups, recorder),
        replicas=ReplicaCheck(config, chunks, groups, precision, recorder),
        norms=norms,
        profiler=StepProfiler(config.profile, profiles, device, times, recorder),
        node=NodeWatch(device, Path(config.run.root)),
        recorder=recorder,
    )
