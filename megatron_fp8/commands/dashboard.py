"""Prints the wandb dashboard of runs as JSON, for review in git, or saves it in a project.

Its sections and panels are those of the series registry; maps of FP8 health show layers upwards, iterations across.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import wandb_workspaces.reports.v2 as reports
import wandb_workspaces.workspaces as workspaces

from megatron_fp8.report import series_registry
from megatron_fp8.report.series import Section

NAME = "megatron-fp8"
# Sections that are open at first.
_OPEN = (Section.TRAINING, Section.THROUGHPUT)


def panels(section: Section) -> dict[str, list[str]]:
    """The names of series by the title of their panel."""
    by_title: dict[str, list[str]] = {}
    for entry in series_registry.REGISTRY.entries:
        if entry.section is section:
            for title, name in entry.panels():
                by_title.setdefault(title, []).append(name)
    return by_title


def workspace(entity: str, project: str) -> workspaces.Workspace:
    """The dashboard of a project; the horizontal axis is wandb's step, which is the iteration."""
    sections = [
        workspaces.Section(
            name=section.value,
            panels=[reports.LinePlot(title=title, y=list(names)) for title, names in panels(section).items()],
            is_open=section in _OPEN,
        )
        for section in Section
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Print or save the dashboard; exit code 1: wandb did not accept it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entity", default="", help="user or team (logging.wandb_entity)")
    parser.add_argument("--project", default="", help="project (logging.wandb_project)")
    parser.add_argument("--json", action="store_true", help="print the dashboard; needs no network")
    settings = parser.parse_args(arguments)
    if settings.json:
        sys.stdout.write(saved_view(settings.entity, settings.project))
        return
    if not settings.entity or not settings.project:
        parser.error("saving needs --entity and --project; --json prints the dashboard without a network")
    try:
        print(workspace(settings.entity, settings.project).save().url)
    except Exception as error:  # noqa: BLE001 - the library documents none of what it raises
        print(f"wandb did not accept the dashboard: {error}; did you run `wandb login`?", file=sys.stderr)
        sys.exit(1)
