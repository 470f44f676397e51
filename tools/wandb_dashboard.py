"""The dashboard of runs in wandb as code: prints the saved view as JSON, for review in git, or saves it in a project.

Sections: training, throughput, and FP8 health, whose maps show layers upwards and iterations across.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import wandb_workspaces.reports.v2 as reports
import wandb_workspaces.workspaces as workspaces

NAME = "megatron-fp8"
# A title and the names of series, for each panel.
Panels = list[tuple[str, list[str]]]

TRAINING: Panels = [
    ("Loss (nats per token)", ["lm loss", "lm loss validation"]),
    ("Validation perplexity", ["lm loss validation ppl"]),
    ("Gradient norm before clipping", ["grad-norm"]),
    ("Learning rate", ["learning-rate"]),
    ("Loss scale", ["loss-scale"]),
    ("Skipped steps", ["skipped-iterations"]),
    ("Consumed tokens", ["consumed-tokens"]),
    ("Samples in a step", ["batch-size"]),
]
THROUGHPUT: Panels = [
    ("Tokens per second", ["tokens-per-second"]),
    ("Tokens per second and GPU", ["tokens-per-second-per-gpu"]),
    ("Model TFLOP/s per GPU", ["throughput"]),
    ("Model FLOP/s, share of the peak (MFU)", ["mfu"]),
    ("Seconds per step", ["iteration-time"]),
    (
        "Parts of a step (s)",
        ["batch-generator-time", "forward-backward-time", "all-grads-sync-time", "optimizer-time", "other-time"],
    ),
    ("Own passes of the fastest and the slowest rank (s)", ["compute-time/fastest-rank", "compute-time/slowest-rank"]),
    ("Share of time waiting for data", ["data-wait-share"]),
    ("Pauses for evaluation and checkpoints (s)", ["pause-seconds"]),
    ("Training held up by a checkpoint (s)", ["checkpoint/hold-up-seconds"]),
    ("Peak memory (bytes), rank 0 and largest", ["peak-memory-bytes", "peak-memory-bytes/largest"]),
    ("Pipeline bubble, by the schedule", ["pipeline-bubble"]),
]
_KINDS = ("embedding", "qkv", "proj", "fc1", "fc2", "norms", "head")
_NORMS = {"grad-norm": "gradient norm", "params-norm": "norm of the masters"}
_LINEARS = ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")
_OPERANDS = ("input", "weight", "grad_output")
_QUANTITIES = {
    "amax": "amax by layer",
    "scale": "scale by layer",
    "clipped": "share clipped by layer",
    "flushed": "share flushed to 0 by layer",
}


def norm_panels() -> Iterator[tuple[str, list[str]]]:
    """Norms by kind of weight, and a map over layers for each kind that layers have."""
    for series, text in _NORMS.items():
        yield f"{text} by kind".capitalize(), [f"{series}/{kind}" for kind in _KINDS]
    yield "Norm of the masters", ["params-norm"]
    for series, text in _NORMS.items():
        for kind in _KINDS[1:-1]:
            yield f"{kind}: {text} by layer", [f"norm map/{kind}/{series}"]


def fp8_panels() -> Iterator[tuple[str, list[str]]]:
    """A map over layers for each quantity of each operand of each linear layer."""
    yield "Layers that fell back to BF16", ["fp8/fallen-back-layers"]
    for quantity, text in _QUANTITIES.items():
        for linear in _LINEARS:
            for operand in _OPERANDS:
                yield f"{linear} {operand}: {text}", [f"fp8 map/{linear}/{operand}/{quantity}"]


@dataclass(frozen=True)
class Part:
    """A section of the dashboard."""

    name: str
    panels: Panels
    is_open: bool


PARTS = (
    Part("Training", TRAINING, True),
    Part("Throughput", THROUGHPUT, True),
    Part("Norms", list(norm_panels()), False),
    Part("FP8 health", list(fp8_panels()), False),
)


def workspace(entity: str, project: str) -> workspaces.Workspace:
    """The dashboard of a project; the horizontal axis is wandb's step, which is the iteration."""
    sections = [
        workspaces.Section(
            name=part.name,
            panels=[reports.LinePlot(title=title, y=list(series)) for title, series in part.panels],
            is_open=part.is_open,
        )
        for part in PARTS
    ]
    return workspaces.Workspace(entity=entity, project=project, name=NAME, sections=sections)


def saved_view(entity: str, project: str) -> str:
    """The view as the library sends it to wandb, as JSON; the same each time, so that a diff shows changes only."""
    # The library has no public way to the JSON that it saves.
    view = workspace(entity, project)._to_model().model_dump(by_alias=True, exclude_none=True, mode="json")
    return json.dumps(_numbered(view), indent=2, ensure_ascii=False) + "\n"


def _numbered(view: Mapping[str, Any]) -> Mapping[str, Any]:
    """Random names of panels replaced by their number."""
    panels = [
        panel for section in view["spec"]["section"]["panelBankConfig"]["sections"] for panel in section["panels"]
    ]
    for number, panel in enumerate(panels):
        panel["__id__"] = f"panel-{number}"
    return view


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: printed or saved; 1: wandb did not take it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entity", default="", help="user or team, as in logging.wandb_entity")
    parser.add_argument("--project", default="", help="project, as in logging.wandb_project")
    parser.add_argument("--json", action="store_true", help="print the saved view; needs no network")
    settings = parser.parse_args(arguments)
    if settings.json:
        sys.stdout.write(saved_view(settings.entity, settings.project))
        return 0
    if not settings.entity or not settings.project:
        parser.error("saving needs --entity and --project; --json prints the view without wandb")
    try:
        print(workspace(settings.entity, settings.project).save().url)
    except Exception as error:  # noqa: BLE001 - the library documents none of what it raises
        print(f"wandb did not take the dashboard: {error}; is `wandb login` done?", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
