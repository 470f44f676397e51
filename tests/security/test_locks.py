"""The locks hold what pyproject.toml asks for, file by file, for every Python, and no place to fetch it from."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement
from packaging.tags import Tag

from tools import lock
from tools.lock import LOCKS, MACHINES, PARTS, PYTHONS, Package

ROOT = LOCKS.parent
# Which parts each environment is made of, and the extras of pyproject.toml that it has.
ENVIRONMENTS = {
    "make": (("run", "dev"), ("dev", "eval", "dashboard"), PYTHONS),
    "CPU image": (("run",), (), ("3.12",)),
    "GPU image": (("run", "gpu", "gpu-source"), ("gpu",), ("3.12",)),
}


# What pyproject.toml's extra `all` consists of.
TRAINER = ("train", "data", "report", "hf")


def text(part: str) -> str:
    return (LOCKS / f"{part}.lock").read_text(encoding="utf-8")


def entries(parts: tuple[str, ...], python: str, machine: str) -> list[Package]:
    found = [one for part in parts for one in lock.read_lock(LOCKS / f"{part}.lock")]
    return [one for one in found if lock.applies(one.marker, python, machine)]


def wanted(extras: tuple[str, ...], python: str) -> list[Requirement]:
    """What pyproject.toml asks for, without a TOML parser, which Python 3.10 lacks."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = [
        re.search(rf"^{name} = \[\n(.*?)^\]", project, re.M | re.S) for name in ("dependencies", *TRAINER, *extras)
    ]
    lines = [line for one in lists if one is not None for line in re.findall(r'^    "([^"]+)",', one[1], re.M)]
    assert len(lines) > 20 + len(extras)
    requirements = map(Requirement, lines)
    return [one for one in requirements if lock.applies(str(one.marker or ""), python, "x86_64")]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_an_environment_gets_all_that_it_asks_for_once(environment: str) -> None:
    parts, extras, pythons = ENVIRONMENTS[environment]
    for python in pythons:
        for machine in MACHINES:
            found = entries(parts, python, machine)
            versions = {one.name: one.version for one in found}
            assert len(versions) == len(found), "one version of each package"
            for requirement in wanted(extras, python):
                assert versions.get(requirement.name) in requirement.specifier, f"{requirement}: run tools/lock.py"


def test_what_is_tested_is_what_the_images_run() -> None:
    """No package has two versions where the images' Python would see both."""
    found = entries(PARTS, "3.12", "x86_64")
    assert len({one.name for one in found}) == len(found)
    assert {one.version for one in found if one.name == "megatron-core"} == {"0.19.2"}
    old = {one.version for one in entries(PARTS, "3.11", "x86_64") if one.name == "megatron-core"}
    assert old == {"0.16.1"}


@pytest.mark.parametrize("part", PARTS)
def test_every_package_has_hashes_and_no_address(part: str) -> None:
    found = lock.read_lock(LOCKS / f"{part}.lock")
    assert [one.name for one in found if not one.hashes] == []
    assert lock.write_lock(part, found) == text(part), "nothing but what tools/lock.py writes"
    assert "://" not in text(part)
    assert not re.search(r"--(index|extra-index|find-links|trusted-host)|@ ", text(part))


def test_the_build_of_torch_is_the_one_whose_hashes_are_known() -> None:
    """`==2.13.0` would let pip choose 2.13.0+cpu, where one is offered, and then refuse its hash."""
    assert re.search(r"^torch===2\.13\.0 ", text("run"), re.M)


@pytest.mark.parametrize(
    ("tag", "targets"),
    [
        (("py3", "none", "any"), {(python, machine) for python in PYTHONS for machine in MACHINES}),
        (("cp312", "cp312", "manylinux_2_28_aarch64"), {("3.12", "aarch64")}),
        (("cp311", "abi3", "manylinux2014_x86_64"), {(python, "x86_64") for python in PYTHONS[1:]}),
        (("py3", "none", "manylinux_2_27_x86_64"), {(python, "x86_64") for python in PYTHONS}),
        (("cp313", "cp313t", "manylinux_2_28_x86_64"), set()),
        (("cp312", "cp312", "musllinux_1_2_x86_64"), set()),
        (("cp312", "cp312", "macosx_11_0_arm64"), set()),
        (("cp314", "cp314", "manylinux_2_28_x86_64"), set()),
        (("py2", "none", "any"), set()),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_only_files_that_someone_here_can_install_are_locked(tag: tuple[str, str, str], targets: set[object]) -> None:
    assert {target for target in lock.TARGETS if lock.fits(Tag(*tag), *target)} == targets


def wheel(tag: str) -> dict[str, object]:
    return {"url": f"https://x/a-1.0-{tag}.whl", "hashes": {"sha256": tag.ljust(64, "0")}}


def test_source_is_locked_only_where_there_is_no_wheel() -> None:
    source = {"url": "https://x/a-1.0.tar.gz", "hashes": {"sha256": "f" * 64}}
    some = {"name": "a", "version": "1.0", "sdist": source, "wheels": [wheel("cp312-cp312-manylinux_2_28_x86_64")]}
    assert lock.package(some, "dev") == Package(
        "a", "1.0", "", frozenset({"f" * 64, "cp312-cp312-manylinux_2_28_x86_64".ljust(64, "0")})
    )
    with pytest.raises(lock.LockError, match=r"a==1\.0 has no wheel for 3\.10 on aarch64"):
        lock.package(some, "run")
    everyones = {**some, "wheels": [wheel("py3-none-any"), wheel("cp312-cp312-win_amd64")], "marker": "os_name == 'nt'"}
    assert lock.package(everyones, "run") is None
    everyones["marker"] = "python_full_version < '3.12' and sys_platform == 'linux'"
    assert lock.package(everyones, "run") == Package(
        "a", "1.0", 'python_version < "3.12"', frozenset({"py3-none-any".ljust(64, "0")})
    )


@pytest.mark.parametrize(
    ("chosen", "marker"),
    [
        (lambda python, machine: True, ""),
        (lambda python, machine: python in ("3.11", "3.12"), 'python_version >= "3.11" and python_version < "3.13"'),
        (lambda python, machine: machine == "aarch64", 'platform_machine == "aarch64"'),
    ],
    ids=["all", "two Pythons", "one machine"],
)
def test_a_marker_is_true_of_its_targets_and_of_no_other(chosen, marker) -> None:  # type: ignore[no-untyped-def]
    targets = [target for target in lock.TARGETS if chosen(*target)]
    assert lock.short_marker(targets) == marker
    assert [target for target in lock.TARGETS if lock.applies(marker, *target)] == targets


def test_targets_that_no_marker_is_short_for_are_refused() -> None:
    with pytest.raises(lock.LockError, match="no marker is short"):
        lock.short_marker([("3.10", "x86_64"), ("3.12", "x86_64")])


def test_a_part_has_what_its_users_need_and_the_smallest_has_what_two_share() -> None:
    needed = {"run": {"torch", "triton"}, "dev": {"torch", "pytest", "zipp"}, "gpu": {"cmake", "zipp"}}
    parts = {name: lock.part_of(name, needed) for name in ("torch", "triton", "pytest", "zipp", "cmake")}
    assert parts == {"torch": "run", "triton": "gpu", "pytest": "dev", "zipp": "run", "cmake": "gpu"}


def test_nothing_is_installed_but_by_hash() -> None:
    """Both images: every `pip install` has the hashes of a lock, or asks no index, or is of a commit."""
    commands = []
    for name in ("Dockerfile", "Dockerfile.cpu"):
        lines = (ROOT / "docker" / name).read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
        commands += re.findall(r"pip install ([^\n&]*)", "\n".join(line for line in lines if line[:1] != "#"))
    locked = [one for one in commands if "--requirement" in one]
    assert len(locked) == 3
    assert all("--no-deps" in one and "--require-hashes" in one for one in locked)
    used = set(re.findall(r"--requirement (\S+)\.lock", " ".join(locked)))
    assert used == {"run", "gpu", "gpu-source"}
    others = [one.strip() for one in commands if one not in locked]
    assert all("--no-index" in one or one.endswith("./apex") for one in others)
    assert sum("--no-index" in one for one in others) == 2


@pytest.mark.slow
def test_the_index_gives_what_is_locked() -> None:
    """Every package of every part, with its hashes: a few minutes of the index's time."""
    try:
        texts = lock.resolve([])
    except lock.LockError as error:
        if re.search(r"uv is missing|dns error|connect", str(error), re.I):
            pytest.skip(str(error).splitlines()[0])
        raise
    assert {part: text(part) for part in PARTS} == texts
