"""Makes the locks in `locks/`: every package in one version, with the SHA-256 of its files, from one resolution.

    python tools/lock.py                          after a change of pyproject.toml: what is locked stays where it fits
    python tools/lock.py --upgrade-package torch  the newest torch that fits; --upgrade: of everything
    python tools/lock.py --check                  change nothing, fail where the index gives something else

The parts are named after who installs them:

    run.lock         everyone: what training needs
    dev.lock         `make`: tests, linters and tools
    gpu.lock         the GPU image: what only a GPU's code loads, and what builds Transformer Engine's extension
    gpu-source.lock  the GPU image, after the others: that extension, which is published as source

Only files for Linux on x86_64 and aarch64 and CPython 3.10 to 3.13 are in them, source only where there is no wheel.
Uses `uv` (pip install uv), which resolves for Pythons that are not here. Needs Python 3.11.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import Marker, default_environment
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "locks"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
TARGETS = tuple((python, machine) for python in PYTHONS for machine in MACHINES)
PARTS = ("run", "dev", "gpu", "gpu-source")
# The Pythons of the last two: Megatron Core 0.19 needs 3.12.
GPU_PYTHONS = PYTHONS[2:]
# Built against the torch of the other parts.
SOURCE = ("transformer-engine-torch",)
# torch and cuda-toolkit ask for these, and load them for a GPU alone: `import torch` needs every other CUDA library.
FOR_GPUS = ("cuda-bindings", "cuda-pathfinder", "nvidia-cusolver", "nvidia-nvtx", "triton")
# `==2.13.0` is also true of 2.13.0+cpu, which pip prefers where it is offered, and which has another hash.
EXACT = ("torch",)
_ENTRY = re.compile(r"^([a-z0-9][\w.-]*)===?([^\s;\\]+)([^\n\\]*)\\?\n((?:    [^\n]*\n)*)", re.M)


class LockError(RuntimeError):
    """What cannot be resolved, or not for a Python that is supported."""


@dataclass(frozen=True)
class Package:
    """One entry of a lock: its marker, empty where all Pythons take it, and the SHA-256 of its files."""

    name: str
    version: str
    marker: str
    hashes: frozenset[str]


def read_lock(path: Path) -> list[Package]:
    """The entries of a lock."""
    return [
        Package(name, version, rest.strip(" ;"), frozenset(re.findall(r"sha256:([0-9a-f]{64})", hashes)))
        for name, version, rest, hashes in _ENTRY.findall(path.read_text(encoding="utf-8"))
    ]


def write_lock(part: str, packages: Iterable[Package]) -> str:
    """The text of one part."""
    lines = [f"# Made by tools/lock.py, which says who installs {part}.lock."]
    for one in sorted(packages, key=lambda one: (one.name, one.marker)):
        pin = f"{one.name}{'===' if one.name in EXACT else '=='}{one.version}"
        head = f"{pin} ; {one.marker}" if one.marker else pin
        lines.append(" \\\n    --hash=sha256:".join([head, *sorted(one.hashes)]))
    return "\n".join(lines) + "\n"


def applies(marker: str, python: str, machine: str) -> bool:
    """Whether CPython `python` on Linux takes an entry with this marker."""
    environment = {
        **{key: str(value) for key, value in default_environment().items()},
        **{"python_version": python, "python_full_version": f"{python}.99", "platform_machine": machine},
        **{"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "extra": ""},
        **{"implementation_name": "cpython", "platform_python_implementation": "CPython"},
    }
    return not marker or Marker(marker).evaluate(environment)


def short_marker(targets: Iterable[tuple[str, str]]) -> str:
    """The shortest marker that is true of these targets and of no other."""
    pythons = [python for python in PYTHONS if any(one == python for one, _ in targets)]
    machines = [machine for machine in MACHINES if any(one == machine for _, one in targets)]
    first, last = PYTHONS.index(pythons[0]), PYTHONS.index(pythons[-1])
    if len(pythons) != last - first + 1 or len(pythons) * len(machines) != len(set(targets)):
        raise LockError(f"no marker is short for {sorted(targets)}")
    found = [f'python_version >= "{pythons[0]}"'] if first > 0 else []
    found += [f'python_version < "{PYTHONS[last + 1]}"'] if last + 1 < len(PYTHONS) else []
    found += [f'platform_machine == "{machines[0]}"'] if len(machines) < len(MACHINES) else []
    return " and ".join(found)


def fits(tag: Tag, python: str, machine: str) -> bool:
    """Whether a wheel with this tag is one for CPython `python` on Linux with glibc."""
    number = int(python.replace(".", ""))
    if tag.abi == "none":
        interpreter = tag.interpreter in ("py3", "py2.py3", f"py{number}", f"cp{number}")
    elif tag.abi == "abi3":
        interpreter = re.fullmatch(r"cp3\d+", tag.interpreter) is not None and int(tag.interpreter[2:]) <= number
    else:
        interpreter = tag.interpreter == tag.abi == f"cp{number}"
    platform = tag.platform == "any" or re.fullmatch(rf"(manylinux\w*|linux)_{machine}", tag.platform) is not None
    return interpreter and platform


def package(entry: dict[str, Any], part: str) -> Package | None:
    """An entry of uv's lock with the files that some target of the part takes; None where no target takes it."""
    name, version = entry["name"], entry["version"]
    pythons = GPU_PYTHONS if part.startswith("gpu") else PYTHONS
    targets = [one for one in TARGETS if one[0] in pythons and applies(entry.get("marker", ""), *one)]
    if not targets:
        return None
    hashes: set[str] = set()
    without = set(targets)
    for wheel in [] if name in SOURCE else entry.get("wheels", ()):
        tags = parse_wheel_filename(wheel["url"].rpartition("/")[2])[3]
        takers = {target for target in targets if any(fits(tag, *target) for tag in tags)}
        if takers:
            hashes.add(wheel["hashes"]["sha256"])
            without -= takers
    if without:
        if "sdist" not in entry or part in ("run", "gpu"):
            raise LockError(f"{name}=={version} has no wheel for {', '.join(map(' on '.join, sorted(without)))}")
        hashes.add(entry["sdist"]["hashes"]["sha256"])
    return Package(name, version, short_marker(targets), frozenset(hashes))


def part_of(name: str, needed: dict[str, set[str]]) -> str:
    """Which part has a package, given what training, `dev` and `gpu` need; what two of them need is everyone's."""
    if name in SOURCE:
        return "gpu-source"
    if name in FOR_GPUS:
        return "gpu"
    if name in needed["run"] or name in needed["dev"] & needed["gpu"]:
        return "run"
    return "dev" if name in needed["dev"] else "gpu"


def resolve(upgrade: list[str]) -> dict[str, str]:
    """The text of each part. Raises LockError."""
    import tomllib  # Python 3.11

    with tempfile.TemporaryDirectory() as directory:
        pins, full = Path(directory) / "pins.txt", Path(directory) / "pylock.toml"
        # uv keeps what stands in its output file, where that still fits.
        pins.write_text("\n".join(_pins()), encoding="utf-8")
        everything = ["--extra", "all"]
        extras = [*everything, "--extra", "dev", "--extra", "gpu"]
        _compile(*extras, "--no-annotate", "--output-file", str(pins), *upgrade)
        held = ["--constraint", str(pins)]
        _compile(*extras, *held, "--format", "pylock.toml", "--output-file", str(full))
        needed = {
            part: set(re.findall(r"^([a-z0-9][\w.-]*)==", _compile(*words, *held, "--no-annotate"), re.M))
            for part, words in (("run", everything), ("dev", extras[:4]), ("gpu", [*everything, *extras[4:]]))
        }
        entries = tomllib.loads(full.read_text(encoding="utf-8"))["packages"]
    packages: dict[str, list[Package]] = {part: [] for part in PARTS}
    for entry in entries:
        part = part_of(entry["name"], needed)
        if (found := package(entry, part)) is not None:
            packages[part].append(found)
    return {part: write_lock(part, found) for part, found in packages.items()}


def _pins() -> Iterable[str]:
    """What is locked, as requirements."""
    for path in sorted(LOCKS.glob("*.lock")):
        for one in read_lock(path):
            yield f"{one.name}=={one.version}" + (f" ; {one.marker}" if one.marker else "")


def _compile(*arguments: str) -> str:
    """Resolve pyproject.toml for all targets: nothing of this machine, neither its configuration nor its index."""
    uv = Path(sys.executable).with_name("uv")
    command = str(uv) if uv.exists() else shutil.which("uv")
    if command is None:
        raise LockError("uv is missing: pip install uv")
    fixed = ["--universal", "--python-version", PYTHONS[0], "--no-config", "--no-python-downloads", "--no-header"]
    words = [command, "pip", "compile", "--quiet", *fixed, *arguments, "pyproject.toml"]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    if ended.returncode != 0:
        raise LockError(f"uv pip compile says:\n{ended.stderr.strip()}")
    return ended.stdout


def main(arguments: list[str] | None = None) -> int:
    """Write or check; 1 with the reason where that is impossible."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing: is this what the index gives?")
    parser.add_argument("--upgrade", action="store_true", help="the newest version of everything that fits")
    parser.add_argument("--upgrade-package", action="append", default=[], metavar="NAME", help="of this package")
    settings = parser.parse_args(arguments)
    upgrade = ["--upgrade"] if settings.upgrade else []
    upgrade += [word for name in settings.upgrade_package for word in ("--upgrade-package", name)]
    try:
        texts = resolve(upgrade)
    except LockError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    changed = False
    for part, text in texts.items():
        path = LOCKS / f"{part}.lock"
        same = path.exists() and path.read_text(encoding="utf-8") == text
        changed |= not same
        if not settings.check:
            path.write_text(text, encoding="utf-8")
        state = "as it was" if same else "not what the index gives" if settings.check else "written"
        print(f"{path.relative_to(ROOT)}: {len(_ENTRY.findall(text))} packages, {state}")
    return 1 if settings.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
