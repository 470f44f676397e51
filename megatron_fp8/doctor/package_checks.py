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
from megatron_fp8.doctor.finding import Finding, Status, Surroundings
from megatron_fp8.report.code_version import code_version, describe_code

DISTRIBUTION = "megatron-fp8"
# Used where they are, and not asked for: their versions belong into the matrix all the same.
_OPTIONAL = ("apex", "flash-attn", "torchao", "transformer-engine-cu12", "transformer-engine-cu13", "triton")


def python(surroundings: Surroundings) -> Finding:  # noqa: ARG001 - every check is called alike
    """Whether this Python is one that the program runs on."""
    running = platform.python_version()
    versions = {"Python": running, DISTRIBUTION: describe_code(code_version())}
    text = f"{running}, {sys.executable}"
    try:
        wanted = metadata(DISTRIBUTION)["Requires-Python"]
    except PackageNotFoundError:
        text += f"; {DISTRIBUTION} itself is not installed"
        return Finding("python", Status.FAULT, text, "pip install --editable . in its directory", versions)
    if not SpecifierSet(wanted).contains(running, prereleases=True):
        return Finding("python", Status.FAULT, f"{text}; it has to be {wanted}", f"use Python {wanted}", versions)
    return Finding("python", Status.OK, text, versions=versions)


def packages(surroundings: Surroundings) -> Finding:  # noqa: ARG001
    """Whether every package that the program needs is installed, in a version that fits."""
    try:
        needed = [Requirement(text) for text in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:
        return Finding("packages", Status.ABSENT, f"{DISTRIBUTION} is not installed, so nothing says what it needs")
    needed = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    versions: dict[str, str] = {}
    wrong = []
    for one in needed:
        found = installed(one.name)
        if found is None:
            wrong.append(str(one))
        elif not one.specifier.contains(Version(found), prereleases=True):
            wrong.append(f"{one} (is {found})")
            versions[one.name] = found
        else:
            versions[one.name] = found
    optional = {name: found for name in _OPTIONAL if (found := installed(name)) is not None}
    if wrong:
        text = f"missing, or of a version that does not fit: {', '.join(wrong)}"
        command = " ".join(f"'{one.split(' (')[0]}'" for one in wrong)
        return Finding("packages", Status.FAULT, text, f"pip install {command}", {**versions, **optional})
    return Finding("packages", Status.OK, f"all {len(versions)} that are needed", versions={**versions, **optional})


def wandb(surroundings: Surroundings) -> Finding:
    """Whether a run here could go to wandb's server."""
    found = installed("wandb")
    if found is None:
        return Finding("wandb", Status.ABSENT, "the package wandb is not installed")
    if surroundings.rank != 0:
        return Finding("wandb", Status.ABSENT, "only rank 0 speaks to wandb")
    missing = missing_login(process_environment())
    if missing is not None:
        text = f"{missing}; only runs with logging.wandb_project and wandb_mode=online need it (`wandb login`)"
        return Finding("wandb", Status.ABSENT, text)
    return Finding("wandb", Status.OK, "there is a login")


def installed(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
