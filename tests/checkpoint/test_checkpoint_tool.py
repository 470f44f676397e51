"""`megatron-fp8 checkpoint` on real checkpoints: intact, corrupt, and different ones."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp8.commands import checkpoint as tool
from tests.checkpoint.training import STEPS_BEFORE, checkpoint_config, save_on_this_rank, train_on_this_rank
from tests.command_line import exit_code
from tests.ranks import run_on_ranks

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def make_config(**parallel: Any):
    return checkpoint_config(
        model={"num_layers": 1}, parallel=parallel, precision={"mode": "fp8", "fp8_amax_history_len": 4}
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs `tp2`: iterations 3 and 6 of two ranks; `one`: 3 and 6 that one rank made from the first of these."""
    root = tmp_path_factory.mktemp("runs")
    two, one = root / "tp2" / "checkpoints", root / "one" / "checkpoints"
    run_on_ranks(2, train_on_this_rank, make_config(**TP2), two)
    run_on_ranks(1, save_loaded, make_config(), one, two / "iter_0000003")
    return root


def save_loaded(config, directory: Path, load: Path) -> None:
    """Save at once what was loaded, and what training makes of it."""
    from megatron_fp8.train.checkpointing import Progress
    from megatron_fp8.train.state import TrainState
    from megatron_fp8.train.step import IntervalLoss

    def save(parts: Any) -> None:
        parts.checkpointer._saved_iteration = 0
        interval = IntervalLoss(parts.device.torch_device)
        parts.checkpointer.after_step(Progress(TrainState(STEPS_BEFORE, 12, 192), interval, None), stops=True)

    train_on_this_rank(config, directory, load, before=save)


@pytest.fixture
def runs(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "runs"))


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = exit_code(tool.main, *arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def call_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, Any]:
    code, out, _ = call(capsys, *arguments, "--json")
    return code, json.loads(out)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_inspect_lists_what_is_inside(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = call_json(capsys, "inspect", runs / "tp2")
    assert code == 0
    assert (found["iteration"], found["layout"]["tensor_model_parallel_size"]) == (6, 2)
    assert found["versions"]["torch"] == version("torch")
    assert found["counters"]["consumed_samples"] == 24
    shape = [250, 64]
    embedding = {"shape": shape, "dtype": "float32", "bytes": 4 * 250 * 64}
    names = [name for name in found["tensors"] if name.startswith("master.embedding")]
    assert [found["tensors"][name] for name in names] == [embedding]
    kinds = found["kinds"]
    assert kinds["master"]["elements"] == kinds["exp_avg"]["elements"] == kinds["exp_avg_sq"]["elements"] > 250 * 64
    assert kinds["precision"]["tensors"] > 8
    assert {"rng", "interval_loss"} <= kinds.keys()
    files = sum(path.stat().st_size for path in (runs / "tp2/checkpoints/iter_0000006").iterdir())
    # Index, manifest and checksums.
    assert 0 < files - found["bytes"] < 30_000
    assert "hidden_size: 64" in found["config"]


def test_inspect_agrees_with_the_index_as_torch_reads_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    path = runs / "tp2" / "checkpoints" / "iter_0000003"
    metadata = FileSystemReader(path).read_metadata()
    _, found = call_json(capsys, "inspect", path)
    assert {name: (list(t.size), str(t.properties.dtype)) for name, t in metadata.state_dict_metadata.items()} == {
        name: (tensor["shape"], f"torch.{tensor['dtype']}") for name, tensor in found["tensors"].items()
    }


def test_inspect_prints_parsable_lines(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "inspect", runs / "one", "--iteration", "3", "--tensors", "--config")
    assert code == 0
    assert "\x1b" not in out
    assert "iteration: 3\n" in out
    rows = [line.split("\t") for line in out.splitlines() if "\t" in line]
    assert ["kind", "tensors", "elements", "dtypes", "bytes"] in rows
    assert any(row[0].startswith("exp_avg_sq.") and row[2] == "float32" for row in rows)
    assert "num_layers: 1" in out


def test_verify_says_intact(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "verify", runs / "one")
    assert code == 0
    assert out.count(": intact") == 3  # two checkpoints and the tracker


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_verify_names_the_corrupt_file(runs: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs / "one" / "checkpoints" / "iter_0000003" / name
    flip_a_bit(path)
    code, out, _ = call(capsys, "verify", runs / "one")
    assert code == 1
    assert str(path) in out
    assert "iter_0000006: intact" in out
    code, found = call_json(capsys, "verify", path.parent)
    assert code == 1
    ((checkpoint, verdict),) = found.items()
    assert (checkpoint, verdict["whole"]) == (str(path.parent), False)
    path.unlink()
    code, out, _ = call(capsys, "verify", path.parent, "--sizes-only")
    assert code == 1
    assert str(path) in out


def test_sizes_are_compared_at_once_and_find_less(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit(runs / "one" / "checkpoints" / "iter_0000003" / "__0_0.distcp")
    assert call(capsys, "verify", runs / "one", "--sizes-only")[0] == 0


def test_latest_is_a_path(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = str(runs / "one" / "checkpoints" / "iter_0000006")
    assert call(capsys, "latest", runs / "one") == (0, expected + "\n", "")
    (Path(expected) / ".metadata").unlink()
    code, out, err = call(capsys, "latest", runs / "one")
    assert (code, out) == (1, "")
    assert ".metadata is missing" in err
    assert "newest intact checkpoint: " + expected.replace("iter_0000006", "iter_0000003") in err
    (runs / "one" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("9")
    code, found = call_json(capsys, "latest", runs / "one")
    assert (code, found["latest"]) == (1, None)
    assert "says 9" in found["problems"][0]


def test_the_same_state_of_another_layout_is_equal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Written by two ranks and by one, so that no piece of the one is a piece of the other."""
    arguments = ("diff", runs / "tp2", runs / "one", "--iteration", "3")
    for kind in ("master.", "exp_avg", "precision."):
        code, found = call_json(capsys, *arguments, "--only", kind, "--all")
        assert (code, {tensor["kind"] for tensor in found["tensors"]}) == (0, {"equal"}), kind
    code, found = call_json(capsys, *arguments)
    assert code == 1
    # Random streams and sums belong to ranks.
    assert {tensor["name"].split(".")[0].split("@")[0] for tensor in found["tensors"]} <= {"rng", "interval_loss"}
    assert {tensor["kind"] for tensor in found["tensors"]} == {"first", "second"}


def test_the_numbers_of_a_difference_are_those_of_the_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Iterations 1 and 3 are filled with 1 and 3 (moments: a quarter and half more), so that all is known."""
    run_on_ranks(1, save_on_this_rank, make_config(), tmp_path, [1, 3])
    first, second = tmp_path / "iter_0000001", tmp_path / "iter_0000003"
    code, found = call_json(capsys, "diff", first, second)
    assert code == 1
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    master = by_name["master.final_norm.weight"]
    assert (master["kind"], master["max_abs"], master["max_rel"], master["num_different"]) == ("values", 2.0, 2.0, 64)
    moment = by_name["exp_avg_sq.final_norm.weight"]
    assert (moment["max_abs"], moment["max_rel"]) == (2.0, pytest.approx(2 / 1.5))
    assert all(name.split(".")[0] in ("master", "exp_avg", "exp_avg_sq") for name in by_name)
    code, out, _ = call(capsys, "diff", first, second, "--only", "master.final_norm.weight")
    assert out.splitlines()[1] == "master.final_norm.weight\tvalues\t2\t2\t64"
    assert "0 tensors are equal, 1 differ" in out


def test_one_element_that_differs_is_found(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the copy one number is changed in the file."""
    from megatron_fp8.checkpoint.plain_index import read_plain_index

    path = runs / "one" / "checkpoints" / "iter_0000006"
    copy = Path(shutil.copytree(path, runs / "copy"))
    (name,) = [name for name in read_plain_index(path) if name.startswith("master.embedding")]
    piece = read_plain_index(path)[name].pieces[0]
    content = bytearray((copy / piece.file).read_bytes())
    stored = content[piece.start : piece.start + piece.num_bytes]
    whole = torch.load(io.BytesIO(bytes(stored)), weights_only=True)
    number = whole.flatten()[77:78].clone()
    at = piece.start + bytes(stored).index(whole.flatten()[70:90].cpu().numpy().tobytes()) + 4 * 7
    content[at : at + 4] = (number * 2).cpu().numpy().tobytes()
    (copy / piece.file).write_bytes(content)
    code, found = call_json(capsys, "diff", path, copy)
    assert code == 1
    (tensor,) = found["tensors"]
    assert (tensor["name"], tensor["num_different"], tensor["max_rel"]) == (name, 1, 1.0)
    assert tensor["max_abs"] == abs(number.item())


@pytest.mark.parametrize("command", ["inspect", "verify", "latest"])
def test_a_wrong_path_is_a_mistake(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, command, tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert "there is no such directory" in err


def test_a_missing_iteration_or_name_is_a_mistake(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "inspect", runs / "one", "--iteration", "7")
    assert code == 2
    assert "use --iteration, one of [3, 6]" in err
    assert call(capsys, "diff", runs / "one", runs / "tp2", "--only", "nothing")[0] == 2


def test_a_foreign_index_is_refused_and_not_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:

    path, marker = runs / "one" / "checkpoints" / "iter_0000006", runs / "ran"

    class Foreign:
        def __reduce__(self):
            return (Path.touch, (marker,))

    (path / ".metadata").write_bytes(pickle.dumps(Foreign()))
    for arguments in (("inspect", path), ("diff", path, runs / "tp2")):
        code, _, err = call(capsys, *arguments)
        assert code == 1
        assert "is refused: it would run" in err
    assert not marker.exists()


def test_all_but_diff_run_where_torch_cannot_be_imported(runs: Path) -> None:
    (runs / "torch.py").write_text("raise ImportError('torch was imported')")
    root = Path(tool.__file__).parents[2]
    for command in ("inspect", "verify", "latest"):
        done = subprocess.run(
            [sys.executable, str(root / "tools/checkpoint.py"), command, "one"],
            cwd=runs,
            env={"PYTHONPATH": f"{runs}:{root}", "PATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
