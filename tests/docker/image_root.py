"""Carries out a Dockerfile in a root directory of its own, without a container engine, and runs commands in it.

    python tests/docker/image_root.py DOCKERFILE ROOT --base BASE [--build-arg NAME=VALUE] [--run "COMMAND"] ...

Needs root, and a root directory like the one of the base image (tools/image_base.sh). Every instruction is carried out
as an engine would; one that this file does not know ends it. Commands of --run start as the image's user, in its
working directory, through its entry point. pip in the root uses the indices that this machine's pip is configured to
use.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

CONTEXT = Path(__file__).resolve().parents[2]
# Instructions that say something about an image and do nothing while it is built.
_DESCRIPTIONS = ("CMD", "LABEL", "EXPOSE", "VOLUME", "STOPSIGNAL", "HEALTHCHECK")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
# Where pip looks for packages, and where the root sees this machine's files while a RUN instruction is carried out.
_HOST = "/run/host"
_PIP_SETTINGS = ("index-url", "extra-index-url", "find-links", "cert")


@dataclass(frozen=True)
class Instruction:
    """One instruction: `COPY`, what stands after it, and the line that it begins on."""

    name: str
    text: str
    line: int


@dataclass
class Stage:
    """What a stage of the build has become: its directory and what later instructions and processes start with."""

    root: Path
    environment: dict[str, str]
    arguments: dict[str, str] = field(default_factory=dict)
    directory: str = "/"
    user: str = "0:0"
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    entry_point: list[str] = field(default_factory=list)


def read_instructions(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile: lines joined at backslashes, comments left out."""
    found: list[Instruction] = []
    parts: list[str] = []
    start = 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        start = start if parts else number
        parts.append(line.rstrip().removesuffix("\\").strip())
        if not line.rstrip().endswith("\\"):
            name, _, rest = " ".join(parts).partition(" ")
            found.append(Instruction(name.upper(), rest.strip(), start))
            parts = []
    if parts:
        raise ValueError(f"line {start}: the file ends inside an instruction")
    return found


def substituted(text: str, values: Mapping[str, str]) -> str:
    """`text` with `$NAME` and `${NAME}` replaced; a name without a value is a mistake, not an empty text."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in values:
            raise ValueError(f"${name} has no value: no ARG or ENV before it names one")
        return values[name]

    return _VARIABLE.sub(value, text)


def context_files(context: Path) -> Iterator[Path]:
    """The files that a build may copy, relative to `context`: those that `.dockerignore` leaves in."""
    path = context / ".dockerignore"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rules = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    for directory, names, files in os.walk(context):
        relative = Path(directory).relative_to(context)
        # What is left out at the top cannot come back further down, as no rule here names a nested exception.
        names[:] = [name for name in names if not ignored(relative / name, rules)]
        yield from (relative / name for name in files if not ignored(relative / name, rules))


def ignored(path: Path, rules: list[str]) -> bool:
    """Whether the last rule that fits `path`, or a directory above it, leaves it out."""
    ways = [path, *path.parents][:-1]
    result = False
    for rule in rules:
        pattern = rule.removeprefix("!").strip("/")
        if pattern.startswith("**/"):
            fits = any(fnmatch.fnmatch(part, pattern[3:]) for part in path.parts)
        else:
            fits = any(len(way.parts) == pattern.count("/") + 1 and fnmatch.fnmatch(str(way), pattern) for way in ways)
        if fits:
            result = not rule.startswith("!")
    return result


def host_pip_settings() -> dict[str, str]:
    """Environment variables that make pip in the root look where this machine's pip looks, files below `_HOST`."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    settings: dict[str, str] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name = key.rsplit(".", 1)[-1]
        if name in _PIP_SETTINGS:
            words = value.strip("'\"").replace("\\n", " ").split()
            words = [re.sub(r"^(file://)?/", rf"\g<1>{_HOST}/", word) for word in words]
            settings[f"PIP_{name.upper().replace('-', '_')}"] = " ".join(words)
    return settings


class Builder:
    """Carries out instructions below `directory`, one directory a stage."""

    def __init__(self, directory: Path, base: Path, build_arguments: Mapping[str, str]) -> None:
        self._directory = directory
        self._base = base
        self._pip = host_pip_settings()
        # As an engine's predefined arguments: in the environment of RUN, not of the image.
        self._build_arguments = {**self._pip, **build_arguments}
        self._global: dict[str, str] = {}
        self._stages: dict[str, Stage] = {}
        self.stage: Stage | None = None

    def carry_out(self, instruction: Instruction) -> None:
        """Do what one instruction says."""
        name, text = instruction.name, instruction.text
        if name in _DESCRIPTIONS:
            return
        if name in ("FROM", "ARG"):
            (self._from if name == "FROM" else self._arg)(text)
        else:
            handler = getattr(self, f"_{name.lower()}", None)
            if handler is None or self.stage is None:
                raise ValueError(f"{name} is not an instruction that this file carries out here")
            handler(self.stage, text)

    def _from(self, text: str) -> None:
        words = substituted(text, self._global).split()
        base = words[0]
        name = words[2] if len(words) == 3 and words[1].upper() == "AS" else str(len(self._stages))
        root = self._directory / name
        below = self._stages.get(base) or Stage(self._base, {"PATH": _PATH})
        subprocess.run(["cp", "-a", "--reflink=auto", below.root, root], check=True)
        self.stage = replace(below, root=root, environment=dict(below.environment), arguments={})
        self._stages[name] = self.stage

    def _arg(self, text: str) -> None:
        name, has_default, default = text.partition("=")
        values = self._global if self.stage is None else self.stage.arguments
        if name in self._build_arguments:
            values[name] = self._build_arguments[name]
        elif has_default:
            values[name] = substituted(default.strip("\"'"), self._known())
        elif name in self._global:
            values[name] = self._global[name]

    def _known(self) -> dict[str, str]:
        return {**self._global} if self.stage is None else {**self.stage.arguments, **self.stage.environment}

    def _env(self, stage: Stage, text: str) -> None:
        known = self._known()
        for word in shlex.split(text):
            name, _, value = word.partition("=")
            stage.environment[name] = substituted(value, known)

    def _shell(self, stage: Stage, text: str) -> None:
        stage.shell = json.loads(text)

    def _workdir(self, stage: Stage, text: str) -> None:
        stage.directory = str(Path(stage.directory) / substituted(text, self._known()))
        (stage.root / stage.directory.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _user(self, stage: Stage, text: str) -> None:
        stage.user = substituted(text, self._known())

    def _entrypoint(self, stage: Stage, text: str) -> None:
        stage.entry_point = json.loads(text)

    def _copy(self, stage: Stage, text: str) -> None:
        *sources, target = shlex.split(substituted(text, self._known()))
        place = stage.root / str(Path(stage.directory) / target).lstrip("/")
        if sources[0].startswith("--from="):
            below = self._stages[sources.pop(0).removeprefix("--from=")].root
            for source in sources:
                subprocess.run(["cp", "-aT", "--reflink=auto", below / source.lstrip("/"), place], check=True)
            return
        if any(source.startswith("--") for source in sources):
            raise ValueError(f"COPY {sources[0]}: only --from is carried out")
        files = list(context_files(CONTEXT))
        for source in sources:
            chosen = [path for path in files if source == "." or path.is_relative_to(source)]
            if not chosen:
                raise ValueError(f"COPY {source}: the build context has no such file")
            for path in chosen:
                is_directory = source == "." or path != Path(source)
                inside = place / (path.relative_to(source) if is_directory else path.name)
                inside.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(CONTEXT / path, inside)

    def _run(self, stage: Stage, text: str) -> None:
        if text.startswith(("--", "[", "<<")):
            raise ValueError(f"RUN {text.split()[0]}: only a plain command is carried out")
        known = {**self._pip, **stage.arguments, **stage.environment}
        self.execute(stage, [*stage.shell, text], known, with_host=True)

    def start(self, command: str) -> None:
        """Run `command` as a container of the last stage would: its user, directory and entry point."""
        assert self.stage is not None
        words = [*self.stage.entry_point, *shlex.split(command)]
        self.execute(self.stage, words, self.stage.environment, with_host=False)

    def execute(self, stage: Stage, command: list[str], environment: Mapping[str, str], with_host: bool) -> None:
        """Run `command` in the stage's root with that environment alone, in process and mount spaces of its own."""
        inside = shlex.quote(str(stage.root))
        mounts = [f"mount --rbind /dev {inside}/dev", f"mount -t proc proc {inside}/proc"]
        for name in ("resolv.conf", "hosts"):
            mounts += [f"touch {inside}/etc/{name}", f"mount --bind /etc/{name} {inside}/etc/{name}"]
        if with_host:
            mounts += [f"mkdir -p {inside}{_HOST}", f"mount --bind -o ro / {inside}{_HOST}"]
        variables = [f"{name}={value}" for name, value in {"HOME": "/root", **environment}.items()]
        enter = ["chroot", f"--userspec={stage.user}", str(stage.root), "/usr/bin/env", "-i", f"-C{stage.directory}"]
        inner = " && ".join([*mounts, f"exec {shlex.join([*enter, *variables, *command])}"])
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "--ipc"]
        subprocess.run([*apart, "sh", "-c", inner], check=True, stdin=subprocess.DEVNULL)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Command line to settings."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("root", type=Path, help="a directory that is not there yet, for the stages' roots")
    parser.add_argument("--base", type=Path, required=True, help="the root of what FROM names")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as docker build has it")
    parser.add_argument("--run", action="append", default=[], metavar="COMMAND", help="run it in the last stage")
    settings = parser.parse_args(arguments)
    if os.geteuid() != 0:
        parser.error("only root can make and enter a root directory")
    if settings.root.exists():
        parser.error(f"{settings.root} is there already; remove it or name another directory")
    return settings


def main(arguments: list[str] | None = None) -> int:
    """Carry out the file, run the commands; 1 with the line where one fails."""
    settings = parse_arguments(arguments)
    settings.root.mkdir(parents=True)
    build_arguments = dict(text.split("=", 1) for text in settings.build_arg)
    builder = Builder(settings.root.resolve(), settings.base.resolve(), build_arguments)
    started = time.monotonic()
    where = ""
    try:
        for step in read_instructions(settings.dockerfile.read_text(encoding="utf-8")):
            where = f"{settings.dockerfile}:{step.line}"
            print(f"[{time.monotonic() - started:4.0f} s] {step.name} {step.text}", flush=True)
            builder.carry_out(step)
        for command in settings.run:
            where = f"--run {command!r}"
            print(f"[{time.monotonic() - started:4.0f} s] {command}", flush=True)
            builder.start(command)
    except (ValueError, subprocess.CalledProcessError) as error:
        print(f"{where}: {error}", file=sys.stderr)
        return 1
    print(f"[{time.monotonic() - started:4.0f} s] done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
