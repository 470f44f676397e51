"""Describes a run as it starts: the values of the `start` record, and the precision chart's file."""

from pathlib import Path

from megatron_fp8.config.environment import SWITCHES
from megatron_fp8.config.fp8_formats import describe_formats, linear_layers_in_fp8, resolved_fp8_format
from megatron_fp8.config.layout import Layout
from megatron_fp8.config.load import process_environment
from megatron_fp8.config.schema import Config
from megatron_fp8.device import Device
from megatron_fp8.planner.throughput import throughput_of
from megatron_fp8.precision.chart import precision_chart
from megatron_fp8.precision.chart_labels import chart_records, format_chart
from megatron_fp8.report.code_version import code_version, versions
from megatron_fp8.report.events import PRECISION_CHART
from megatron_fp8.report.record import Value


def start_record(config: Config, layout: Layout, device: Device, run_directory: Path | None) -> dict[str, Value]:
    """What the run is and where it runs; the precision chart also as a file of `run_directory`."""
    chart = precision_chart(config, layout)
    if run_directory is not None:
        (run_directory / PRECISION_CHART).write_text(format_chart(chart) + "\n", encoding="utf-8")
    return {
        "run directory": str(run_directory),
        "device": device.description,
        "emulated": device.emulated,
        "precision": _precision(config),
        "layout": {
            "world_size": layout.world_size,
            "tensor_model_parallel_size": layout.tensor_model_parallel_size,
            "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
            "data_parallel_size": layout.data_parallel_size,
            "num_microbatches": layout.num_microbatches,
            "micro_batch_size": layout.micro_batch_size,
        },
        "parameters": layout.num_parameters,
        "mfu": throughput_of(config, layout, device.description, device.emulated).note,
        "versions": versions(),
        "code": code_version(),
        **_deterministic_mode(config),
        "precision chart": chart_records(chart),
    }


def _precision(config: Config) -> dict[str, Value]:
    precision, num_layers = config.precision, config.model.num_layers
    in_fp8, linear_layers = linear_layers_in_fp8(precision, num_layers)
    fp8: dict[str, Value] = {"recipe": precision.fp8_recipe, "format": resolved_fp8_format(precision)}
    return {
        "description": describe_formats(precision, num_layers),
        "mode": precision.mode,
        **(fp8 if precision.mode == "fp8" else {}),
        "linear_layers_in_fp8": in_fp8,
        "linear_layers": linear_layers,
    }


def _deterministic_mode(config: Config) -> dict[str, Value]:
    if not config.training.deterministic_mode:
        return {}
    environ = process_environment()
    return {"deterministic mode": {switch.name: environ.get(switch.name) for switch in SWITCHES}}
