"""The run directory: never an existing one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from config_samples import load_small

from megatron_fp8.config.problem import ConfigError
from megatron_fp8.config.run_start import LOCK, create_run_directory, make_run_directory_for_all, resolve_run_directory
from megatron_fp8.config.schema import Config
from megatron_fp8.faults.run_lock import locked_run

NEW_NAME = "run.new_name_if_exists=true"


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    """A config whose runs lie in `tmp_path/runs`."""
    return lambda *overrides: load_small(tmp_path, [f"run.root={tmp_path / 'runs'}", *overrides]).config


def test_a_new_name_is_taken_as_it_is(tmp_path: Path, config: Callable[..., Config]) -> None:
    assert resolve_run_directory(config()) == tmp_path / "runs" / "small"
    assert not (tmp_path / "runs").exists()
    assert create_run_directory(config()).is_dir()


def test_an_existing_directory_is_refused_with_a_free_name(tmp_path: Path, config: Callable[..., Config]) -> None:
    for name in ("small", "small-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        resolve_run_directory(config())
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("run.name", "small")
    assert "run.name=small-3" in problem.use_instead
    assert resolve_run_directory(config("run.name=small-3")).name == "small-3"
    assert create_run_directory(config(NEW_NAME)).name == "small-3"
    assert create_run_directory(config(NEW_NAME)).name == "small-4"


def test_a_broken_link_counts_as_existing(tmp_path: Path, config: Callable[..., Config]) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "small").symlink_to(tmp_path / "nowhere")
    assert create_run_directory(config(NEW_NAME)).name == "small-2"


def test_what_a_start_left_that_failed_before_its_run_began_counts_as_nothing(
    tmp_path: Path, config: Callable[..., Config]
) -> None:
    directory = tmp_path / "runs" / "small"
    make_run_directory_for_all(config())
    with locked_run(directory):
        with pytest.raises(ConfigError, match="exists"):
            resolve_run_directory(config())
        assert resolve_run_directory(config(NEW_NAME)).name == "small-2"
    assert [path.name for path in directory.iterdir()] == [LOCK]
    for overrides in ([], [NEW_NAME]):
        assert resolve_run_directory(config(*overrides)) == directory
        assert create_run_directory(config(*overrides)) == directory
    (directory / "config.yaml").touch()
    with pytest.raises(ConfigError, match="exists"):
        create_run_directory(config())


def test_jobs_at_once_get_different_directories(config: Callable[..., Config]) -> None:
    loaded = config(NEW_NAME)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: create_run_directory(loaded), range(16)))
    assert sorted(path.name for path in made) == sorted(["small", *(f"small-{n}" for n in range(2, 17))])


def test_a_root_that_is_a_file_is_reported(tmp_path: Path, config: Callable[..., Config]) -> None:
    (tmp_path / "file").touch()
    for root in ("file", "file/below"):
        with pytest.raises(ConfigError, match="not a directory"):
            resolve_run_directory(config(f"run.root={tmp_path / root}"))
