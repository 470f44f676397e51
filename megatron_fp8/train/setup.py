"""Builds what the training loop runs on, this rank's share of it: groups, precision, model, optimizer, monitors.

Imports Transformer Engine and Megatron Core, so `device.prepare()` comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_fp8.checkpoint.contents import model_places
from megatron_fp8.checkpoint.live import LiveState
from megatron_fp8.config.layout import Layout
from megatron_fp8.config.schema import Config
from megatron_fp8.device import Device
from megatron_fp8.model.build import build_model
from megatron_fp8.model.megatron_config import connect_training
from megatron_fp8.monitors.fp8_health import Fp8HealthMonitor
from megatron_fp8.monitors.heartbeat import Heartbeat
from megatron_fp8.monitors.node import NodeMonitor
from megatron_fp8.monitors.nonfinite import StepJudge
from megatron_fp8.monitors.norms import NormMonitor
from megatron_fp8.monitors.profiler import StepProfiler
from megatron_fp8.monitors.protocol import Monitor
from megatron_fp8.monitors.replicas import ReplicaMonitor
from megatron_fp8.monitors.straggler import StragglerMonitor, mark_own_work
from megatron_fp8.optim.optimizer import build_optimizer, build_schedule
from megatron_fp8.parallel.groups import ParallelGroups, amax_group, build_groups, seed_ranks
from megatron_fp8.precision.manager import PrecisionManager
from megatron_fp8.precision.policy import build_policy
from megatron_fp8.report.record import Recorder
from megatron_fp8.train.batches import Batches
from megatron_fp8.train.checkpointing import Checkpointer
from megatron_fp8.train.metrics import IntervalMetrics
from megatron_fp8.train.step import Stepper
from megatron_fp8.train.step_times import GRADIENTS, StepTimes


@dataclass(frozen=True)
class TrainingParts:
    """What the loop runs on, this rank's share of it."""

    config: Config
    device: Device
    groups: ParallelGroups
    chunks: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler
    precision: PrecisionManager
    batches: Batches
    stepper: Stepper
    judge: StepJudge
    monitors: Sequence[Monitor]
    metrics: IntervalMetrics
    profiler: StepProfiler
    times: StepTimes
    heartbeat: Heartbeat
    health: Fp8HealthMonitor
    checkpointer: Checkpointer
    recorder: Recorder


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
        # Transformer Engine asks torch, too.
        torch.use_deterministic_algorithms(True)
    groups = build_groups(config.parallel)
    seed_ranks(config.training.seed, groups)
    precision = PrecisionManager(
        build_policy(config.precision, config.model.num_layers),
        amax_group(config.precision.amax_reduction, groups),
        device.torch_device,
        rank_name=".".join(f"{n}{g.rank()}of{g.size()}" for n, g in (("tp", groups.tp), ("dp", groups.dp))),
    )
    heartbeat = Heartbeat()
    times = StepTimes(device, heartbeat.on_span)
    chunks = build_model(config, layout, vocab_size, groups, precision, device.torch_device)
    optimizer = build_optimizer(config, chunks, precision.policy, times)
    connect_training(config, chunks, optimizer, times, times(GRADIENTS))
    mark_own_work(chunks, times, groups.tp.size())
    schedule = build_schedule(config, optimizer)
    places = model_places(chunks, layout, config.model.activation, groups, config.parallel.use_distributed_optimizer)
    live = LiveState(chunks, optimizer, schedule, precision, places, device.torch_device)
    health = Fp8HealthMonitor(precision, groups, config.logging.log_interval)
    monitors: list[Monitor] = [health, NodeMonitor(device, Path(config.run.root))]
    norms_interval = config.logging.norms_interval
    norms_interval = config.logging.log_interval if norms_interval is None else norms_interval
    if norms_interval > 0:
        monitors.append(NormMonitor(optimizer, places, config.model.num_layers, device.torch_device, norms_interval))
    if config.faults.replica_check_interval > 0 and groups.world_size > 1:
        monitors.append(ReplicaMonitor(config, chunks, groups, precision))
    if config.faults.slow_rank_factor is not None and groups.world_size > 1:
        monitors.append(StragglerMonitor(config.faults.slow_rank_factor, config.faults.slow_rank_intervals, groups))
    return TrainingParts(
        config=config,
        device=device,
        groups=groups,
        chunks=chunks,
        optimizer=optimizer,
        schedule=schedule,
        precision=precision,
        batches=Batches(config, layout, groups, device.torch_device),
        stepper=Stepper(chunks, groups, precision, device.torch_device, times),
        judge=StepJudge(config, groups, chunks),
        monitors=monitors,
        metrics=IntervalMetrics(config, layout, device, times, monitors),
        profiler=StepProfiler(config.profile, profiles, device, times),
        times=times,
        heartbeat=heartbeat,
        health=health,
        checkpointer=Checkpointer(config, layout, checkpoints, live, health, recorder),
        recorder=recorder,
    )
