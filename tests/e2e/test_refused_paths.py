"""A path that the system refuses ends with exit code 2 and what is wrong with it, before torch, and leaves nothing.

Every key of the schema that names a place is tried against everything that can stand in its way. Permissions count
here: the program runs without root's right to pass over them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron_fp8.config.fields import config_fields
from megatron_fp8.config.limits import Place
from tests.e2e.conftest import Tiny
from tests.e2e.launch import clean_environment
from tests.e2e.path_obstacles import OBSTACLES, Obstacle, drop_privileges

PLACES = {key: spec.place for key, spec in config_fields().items() if spec.place is not None}
# Keys whose texts are names, patterns and variables.
NO_PLACES = {
    "run.name",
    "parallel.environment",
    "data.split",
    "data.eod_token",
    "model.hf_model_type",
    "data.tiktoken_pattern",
    "logging.wandb_project",
    "logging.wandb_entity",
    "logging.wandb_exp_name",
    "logging.wandb_group",
    "logging.wandb_tags",
    "logging.wandb_notes",
}
WANTED = {
    Place.FILE: "file",
    Place.TOKEN_FILES: "file",
    Place.CHECKPOINTS: "directory",
    Place.RUNS: "directory",
    Place.CACHE: "directory",
    Place.IN_RUN: "directory",
}
# data_path takes the place of the other two.
SETS = {"data.data_path": ["data.train_data_path=[]", "data.valid_data_path=[]"]}
WANDB = ["logging.wandb_project=p", "logging.wandb_mode=offline"]


@pytest.fixture(autouse=True)
def _permissions_count(tmp_path: Path) -> None:
    closed = tmp_path / "closed-for-everybody"
    closed.touch(mode=0)
    try:
        refused = subprocess.run(["cat", closed], capture_output=True, preexec_fn=drop_privileges, check=False)
    except subprocess.SubprocessError:
        pytest.skip("this root cannot give up its right to pass over permissions")
    if refused.returncode == 0:
        pytest.skip("permissions do not count here: root's right to pass over them is inherited")
    closed.unlink()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """An empty directory, whose closed parts are opened again at the end."""
    directory = tmp_path / "place"
    directory.mkdir()
    yield directory
    for path in sorted(directory.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o700)


# Command lines, one after the other in one process: each costs a start of Python otherwise.
CHECK_MANY = """\
import contextlib, io, json, sys, traceback
from megatron_fp8.commands.train import parse_command_line
ends = []
for arguments in json.load(sys.stdin):
    errors, code = io.StringIO(), 0
    with contextlib.redirect_stderr(errors):
        try:
            parse_command_line(arguments, {})
        except SystemExit as end:
            code = end.code
        except Exception:
            traceback.print_exc()
            code = 1
    ends.append((code, errors.getvalue()))
assert "torch" not in sys.modules
json.dump(ends, sys.stdout)
"""


def refuse_all(directory: Path, command_lines: Sequence[Sequence[str]]) -> list[str]:
    """What each command line says, which must end with code 2 before torch and leave nothing."""
    before = sorted(directory.rglob("*"))
    ended = subprocess.run(
        [sys.executable, "-c", CHECK_MANY],
        input=json.dumps(command_lines),
        cwd=directory,
        env=clean_environment(),
        capture_output=True,
        text=True,
        preexec_fn=drop_privileges,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    texts = []
    for code, text in json.loads(ended.stdout):
        assert (code, "Traceback" in text) == (2, False), text
        texts.append(text)
    assert sorted(directory.rglob("*")) == before, "something was made for a run that does not start"
    return texts


def refuse(tiny: Tiny, directory: Path, *arguments: str) -> str:
    """What one command line on the tiny config says."""
    return refuse_all(directory, [[str(tiny.write_config(directory)), *arguments]])[0]


def said_of(key: str, text: str) -> list[str]:
    """The reasons given for a key."""
    lines = text.splitlines()
    return [lines[number + 1] for number, line in enumerate(lines) if line.startswith(f"{key} = ")]


def written(key: str, path: str) -> str:
    """`key=path` with the path in YAML's double quotes, in which every character can be written."""
    text = path.replace("\0", "\\0")
    return f'{key}=["{text}"]' if config_fields()[key].kind == "strings" else f'{key}="{text}"'


def test_every_text_of_the_schema_is_a_place_or_known_to_be_none() -> None:
    texts = {key for key, spec in config_fields().items() if spec.kind in ("str", "strings")}
    assert texts == PLACES.keys() | NO_PLACES


def keys_in_the_way(obstacle: Obstacle) -> list[str]:
    """The keys for which the obstacle is one."""
    keys = [key for key, kind in PLACES.items() if obstacle.wanted in ("", WANTED.get(kind, obstacle.wanted))]
    if obstacle.name in ("file", "directory"):
        keys = [key for key in keys if PLACES[key] is not Place.FILE_OR_FOLDER]
    if obstacle.name == "device":  # whose name has no .idx behind it
        keys = [key for key in keys if PLACES[key] is not Place.TOKEN_FILES]
    return keys


@pytest.mark.parametrize("obstacle", OBSTACLES, ids=str)
def test_every_key_that_names_a_place_says_what_is_refused(
    obstacle: Obstacle, tiny: Tiny, tmp_path: Path, place: Path
) -> None:
    path, why = obstacle.make(place), obstacle.why.format(place=place)
    if os.path.lexists(place / Path(path).name):
        # A prefix of token files is the name of one of them without its end.
        for end in (".idx", ".bin"):
            Path(f"{path}{end}").symlink_to(path)
    config, keys = str(tiny.write_config(tmp_path)), keys_in_the_way(obstacle)
    alone = ("data.data_path", "run.root", "precision.from_accelerate")
    groups = [[key for key in keys if key not in alone], *([key] for key in alone if key in keys)]
    lines = [
        [config, *WANDB, *(text for key in group for text in (*SETS.get(key, ()), written(key, path)))]
        for group in groups
    ]
    if "run.root" in keys:
        groups.append(["run.root"])
        lines.append([config, "--resume=auto", written("run.root", path)])
    for group, text in zip(groups, refuse_all(tmp_path, lines), strict=True):
        for key in group:
            reasons = said_of(key, text)
            assert reasons, f"nothing is said of {key}:\n{text}"
            assert all(why in reason for reason in reasons), reasons
            assert len(reasons) == len(set(reasons))


@pytest.mark.parametrize("obstacle", [item for item in OBSTACLES if item.wanted in ("", "file")], ids=str)
def test_a_config_and_its_base_say_what_is_refused(obstacle: Obstacle, tmp_path: Path, place: Path) -> None:
    path, why = obstacle.make(place), obstacle.why.format(place=place)
    text = path.replace("\0", "\\0")
    (tmp_path / "child.yaml").write_text(f'base: "{text}"\n', encoding="utf-8")
    lines = [["child.yaml"], *([[path]] if "\0" not in path else [])]
    for said, key in zip(refuse_all(tmp_path, lines), ("base", "CONFIG"), strict=False):
        (reason,) = said_of(key, said)
        assert why in reason


def test_a_run_directory_whose_parts_are_closed_is_not_continued(tiny: Tiny, tmp_path: Path, place: Path) -> None:
    (place / "tiny" / "checkpoints").mkdir(parents=True)
    (place / "tiny" / "checkpoints").chmod(0)
    said = refuse(tiny, tmp_path, "--resume=auto", f"run.root={place}")
    assert "permission denied: " in said
    assert "checkpoints has mode 0000" in said


def test_a_tensorboard_directory_that_is_a_file_is_found_before_the_run(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "board").touch()
    said = refuse(tiny, tmp_path, f"logging.tensorboard_dir={tmp_path}/board")
    (reason,) = said_of("logging.tensorboard_dir", said)
    assert "is a file, not a directory" in reason


def test_indices_beside_token_files_that_cannot_be_kept_are_found_before_the_run(
    tiny: Tiny, tmp_path: Path, place: Path
) -> None:
    for name in ("train.bin", "train.idx"):
        (place / name).write_bytes((tiny.data / name).read_bytes())
    place.chmod(0o500)
    prefix = f"data.train_data_path=[{place}/train]"
    said = refuse(tiny, tmp_path, prefix)
    (reason,) = said_of("data.data_cache_path", said)
    assert f"cannot store sample indices there: permission denied: {place} has mode 0500" in reason


def test_a_long_name_is_said_of_the_name(tiny: Tiny, tmp_path: Path) -> None:
    said = refuse(tiny, tmp_path, f"run.name={'n' * 241}")
    assert said_of("run.name", said)
    assert "run.root" not in said
