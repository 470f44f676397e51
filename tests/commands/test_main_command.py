"""`megatron-fp8`: finds commands by name, imports no other, and says what is missing."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_fp8 import __version__
from megatron_fp8.commands import main as dispatcher
from megatron_fp8.commands.main import COMMANDS, Command, main
from megatron_fp8.extras import MODULES, missing_extra
from tests.command_line import exit_code

ROOT = Path(__file__).resolve().parents[2]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, "--help") == 0
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in shown
        assert command.help in shown


def test_without_a_command_the_usage_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err[:6]) == ("", "usage:")


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, "--version") == 0
    assert capsys.readouterr().out == f"megatron-fp8 {__version__}\n"


def test_an_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, "chekpoint") == 2
    assert "unknown command 'chekpoint'; did you mean checkpoint?" in capsys.readouterr().err
    assert exit_code(main, "xyzzy") == 2
    assert "the commands are" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_is_called_by_its_name(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["megatron-fp8"])
    assert exit_code(main, name, "--help") == 0
    assert f"usage: megatron-fp8 {name}" in capsys.readouterr().out


SCRIPTS = [ROOT / "pretrain.py", *sorted(ROOT.glob("tools/*.py"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_has_help(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    assert exit_code(lambda _: runpy.run_path(str(script), run_name="__main__")) == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_a_command_imports_no_other_and_no_torch() -> None:
    program = (
        "import sys\nfrom megatron_fp8.commands.main import main\n"
        "try:\n    main(['checkpoint', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted(name for name in sys.modules if name == 'torch' or name.startswith('megatron_fp8.commands.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = ast.literal_eval(done.stdout.splitlines()[-1])
    assert loaded == ["megatron_fp8.commands.checkpoint", "megatron_fp8.commands.main"]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(COMMANDS, "broken", Command("broken", ""))

    def not_there(_: str) -> None:
        raise ModuleNotFoundError("No module named 'pyarrow.parquet'", name="pyarrow.parquet")

    monkeypatch.setattr(dispatcher, "import_module", not_there)
    assert exit_code(main, "broken") == 2
    assert (
        "broken: pyarrow.parquet is not installed\n    use: pip install 'megatron-fp8[data]'" in capsys.readouterr().err
    )


def test_another_missing_module_is_an_error_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(_: str) -> None:
        raise ModuleNotFoundError("No module named 'megatron_fp8.x'", name="megatron_fp8.x")

    monkeypatch.setattr(dispatcher, "import_module", not_there)
    with pytest.raises(ModuleNotFoundError):
        main(["checkpoint"])
    assert missing_extra(ModuleNotFoundError(name=None)) is None


def test_the_modules_of_extras_are_those_of_pyproject() -> None:
    """Both ways: what an extra installs is named, and what is named, that extra installs."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        extra: {canonicalize_name(Requirement(text).name) for text in project["optional-dependencies"][extra]}
        for extra in MODULES
    }
    owners = {module: {canonicalize_name(name) for name in names} for module, names in packages_distributions().items()}
    for extra, modules in MODULES.items():
        for module in modules:
            assert owners[module] & extras[extra], f"[{extra}] does not install {module}"
    known = {name for modules in MODULES.values() for module in modules for name in owners[module]}
    assert set().union(*extras.values()) <= known
