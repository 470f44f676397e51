"""Makes, or checks, the locks of the GPU image: every package with its version and hashes, for Python 3.12 on Linux.

    python tools/image_lock.py            write docker/gpu.lock and docker/gpu-source.lock
    python tools/image_lock.py --check    ask the registry about every pip line of docker/Dockerfile

Uses `uv` (pip install uv), which resolves for a Python that is not here, and reads a source package's own metadata.
Versions that constraints.txt has are taken from there, so that both images have the same.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
WANTED = DOCKER / "gpu.in"
# Wheels, installed first; and what is only published as source and is built against the torch of the first.
WHEELS_LOCK = DOCKER / "gpu.lock"
SOURCE_LOCK = DOCKER / "gpu-source.lock"
SOURCE = ("transformer-engine-torch",)
# The Python and the C library of the image's base, Ubuntu 24.04.
TARGET = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_39"]
_INSTALL = re.compile(r"pip install (.*)")


class LockError(RuntimeError):
    """What cannot be resolved, or a line that cannot be checked."""


def resolve() -> str:
    """The whole lock: every package of pyproject.toml and docker/gpu.in, pinned, with hashes."""
    own = {match[1].lower() for match in re.finditer(r"^([\w.-]+).*==", WANTED.read_text(encoding="utf-8"), re.M)}
    with tempfile.TemporaryDirectory() as directory:
        constraints = Path(directory) / "constraints.txt"
        kept = [
            line
            for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
            if line.partition("==")[0] not in own
        ]
        constraints.write_text("\n".join(kept), encoding="utf-8")
        inputs = [ROOT / "pyproject.toml", WANTED, "--constraint", constraints]
        only = ["--only-binary", ":all:", *(word for name in SOURCE for word in ("--no-binary", name))]
        return _uv(["pip", "compile", *map(str, inputs), *TARGET, *only, "--generate-hashes", "--no-annotate", "-q"])


def divided(lock: str) -> tuple[str, str]:
    """The part of the lock that is wheels, and the part that is source; without the lock's own comments."""
    entries = re.findall(r"^[a-z0-9][^\n]*\n(?:    [^\n]*\n)*", lock, re.M)
    source = [entry for entry in entries if entry.partition("==")[0] in SOURCE]
    if len(source) != len(SOURCE):
        raise LockError(f"the lock has {len(source)} of the source packages {', '.join(SOURCE)}")
    return "".join(entry for entry in entries if entry not in source), "".join(source)


def install_lines(dockerfile: str) -> list[list[str]]:
    """The arguments of every `pip install` in a Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n", " ", "\n".join(line for line in dockerfile.splitlines() if not line.startswith("#")))
    commands = [part.strip() for line in text.splitlines() for part in line.split("&&")]
    return [match[1].split() for command in commands if (match := _INSTALL.search(command))]


def check(dockerfile: Path) -> list[str]:
    """Ask the registry about every pip line of `dockerfile`; says what each is. Raises LockError."""
    said = []
    for words in install_lines(dockerfile.read_text(encoding="utf-8")):
        line = f"pip install {' '.join(words)}"
        if "--requirement" in words:
            lock = DOCKER / Path(words[words.index("--requirement") + 1]).name
            said.append(f"{line}: {_check_lock(lock)}")
        elif "--no-index" in words:
            said.append(f"{line}: asks no registry")
        elif words[-1].startswith("./"):
            said.append(f"{line}: from a commit, which no package registry has: not checked")
        else:
            raise LockError(f"{line}: packages without a lock; put them into docker/gpu.in")
    if not said:
        raise LockError(f"{dockerfile} installs nothing")
    return said


def _check_lock(lock: Path) -> str:
    """Resolve a lock as it stands for the image's Python, and compare its hashes with those that the registry tells."""
    locked = _entries(lock.read_text(encoding="utf-8"))
    binary = [] if lock == SOURCE_LOCK else ["--only-binary", ":all:"]
    told = _entries(_uv(["pip", "compile", str(lock), *TARGET, "--no-deps", *binary, "--generate-hashes", "-q"]))
    for name, (version, hashes) in locked.items():
        if told.get(name, ("", set()))[0] != version:
            raise LockError(f"{lock.name}: the registry does not give {name}=={version}")
        if not hashes <= told[name][1]:
            raise LockError(f"{lock.name}: the registry's files of {name}=={version} have other hashes")
    return f"{len(locked)} packages resolve, and their hashes are the registry's"


def _entries(lock: str) -> dict[str, tuple[str, set[str]]]:
    """Version and hashes of each package of a lock."""
    found = re.findall(r"^([a-z0-9][\w.-]*)==(\S+)([^\n]*\n(?:    [^\n]*\n)*)", lock, re.M)
    return {name: (version, set(re.findall(r"sha256:[0-9a-f]{64}", rest))) for name, version, rest in found}


def _uv(arguments: Sequence[str]) -> str:
    uv = Path(sys.executable).with_name("uv")
    command = str(uv) if uv.exists() else shutil.which("uv")
    if command is None:
        raise LockError("uv is missing: pip install uv")
    ended = subprocess.run([command, *arguments], capture_output=True, text=True, cwd=ROOT)
    if ended.returncode != 0:
        raise LockError(f"uv {' '.join(arguments[:2])} says:\n{ended.stderr.strip()}")
    return ended.stdout


def main(arguments: list[str] | None = None) -> int:
    """Write or check; 1 with the reason where that is impossible."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, ask the registry about docker/Dockerfile")
    settings = parser.parse_args(arguments)
    try:
        if settings.check:
            print("\n".join(check(DOCKER / "Dockerfile")))
            return 0
        for path, text in zip((WHEELS_LOCK, SOURCE_LOCK), divided(resolve()), strict=True):
            path.write_text(
                f"# Made by tools/image_lock.py of pyproject.toml, docker/gpu.in and constraints.txt.\n{text}"
            )
            print(f"{path.relative_to(ROOT)}: {len(re.findall('^[a-z0-9]', text, re.M))} packages")
    except LockError as error:
        print(f"image_lock: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
