"""Checks of installed packages, of Python, and of the login at wandb. Imports no torch."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_fp8.config.load import process_environment
from megatron_fp8.config.rules_run import missing_login
from megatron_fp8.doctor.finding import Finding, HostContext, Status
from megatron_fp8.report.code_version import code_version, describe_code

DISTRIBUTION = "megatron-fp8"
# Of the distribution: what a training run imports.
_EXTRAS = ("", "train", "data", "report")
# Used if installed, never required; listed in the version matrix.
_OPTIONAL = ("apex", "flash-attn", "torchao", "transformer-engine-cu12", "transformer-engine-cu13", "triton")


def python(context: HostContext) -> Finding:  # noqa: ARG001 - every check is called alike
    """Whether this Python version is supported."""
    running = platform.python_version()
    versions = {"Python": running, DISTRIBUTION: describe_code(code_version())}
    text = f"{running}, {sys.executable}"
    try:
        wanted = metadata(DISTRIBUTION)["Requires-Python"]
    except PackageNotFoundError:
        text += f"; {DISTRIBUTION} itself is not installed"
        return Finding("python", Status.FAULT, text, "run pip install --editable . in the repository", versions)
    if not SpecifierSet(wanted).contains(running, prereleases=True):
        return Finding("python", Status.FAULT, f"{text}; required: {wanted}", f"use Python {wanted}", versions)
    return Finding("python", Status.OK, text, versions=versions)


def packages(context: HostContext) -> Finding:  # noqa: ARG001
    """Whether every required package is installed in a compatible version."""
    try:
        needed = [Requirement(text) for text in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:
        return Finding("packages", Status.ABSENT, f"{DISTRIBUTION} is not installed, so its requirements are unknown")
    needed = [
        one for one in needed if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in _EXTRAS)
    ]
    versions: dict[str, str] = {}
    wrong = []
    for one in needed:
        found, named = installed(one.name), str(one).partition(";")[0].strip()
        if found is None:
            wrong.append(named)
        elif not one.specifier.contains(Version(found), prereleases=True):
            wrong.append(f"{named} (is {found})")
            versions[one.name] = found
        else:
            versions[one.name] = found
    optional = {name: found for name in _OPTIONAL if (found := installed(name)) is not None}
    if wrong:
        text = f"missing or incompatible: {', '.join(wrong)}"
        command = " ".join(f"'{one.split(' (')[0]}'" for one in wrong)
        return Finding("packages", Status.FAULT, text, f"pip install {command}", {**versions, **optional})
    return Finding("packages", Status.OK, f"all {len(versions)} required packages", versions={**versions, **optional})


def wandb(context: HostContext) -> Finding:
    """Whether a run here can log to wandb's server."""
    found = installed("wandb")
    if found is None:
        return Finding("wandb", Status.ABSENT, "wandb is not installed")
    if context.rank != 0:
        return Finding("wandb", Status.ABSENT, "only rank 0 logs to wandb")
    missing = missing_login(process_environment())
    if missing is not None:
        text = f"{missing}; only runs with logging.wandb_project and wandb_mode=online need it (`wandb login`)"
        return Finding("wandb", Status.ABSENT, text)
    return Finding("wandb", Status.OK, "logged in")


def installed(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
