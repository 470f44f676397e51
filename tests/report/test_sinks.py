"""Views of the record: failures that stop nothing, TensorBoard's and wandb's files as their own clients write them."""

from __future__ import annotations

import json
import math
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sink_files import only_wandb_file, tensorboard_scalars, wandb_history, wandb_messages

from megatron_fp8.config.load import dump_config
from megatron_fp8.report.guarded import Guarded
from megatron_fp8.report.record import METRICS, JsonLines, Recorder, Sink, drop_records_after, read_records
from megatron_fp8.report.series_registry import series_of
from megatron_fp8.report.views import record_sink, sinks_of_run
from tests.small_run import small_config

FP8 = "fp8/layers.2/mlp.linear_fc1/input"


class Memory:
    """Keeps records; fails while `broken`."""

    def __init__(self) -> None:
        self.iterations: list[int] = []
        self.broken = False
        self.opened = 0

    def write(self, record: Mapping[str, Any]) -> None:
        if self.broken:
            raise ConnectionError("no route to host")
        self.iterations.append(record["iteration"])

    def close(self) -> None:
        if self.broken:
            raise ConnectionError("no route to host")


def guarded_memory(memory: Memory, said: list[str]) -> Guarded:
    def open_memory(_: int) -> tuple[Sink, int]:
        memory.opened += 1
        return memory, -1

    return Guarded("dashboard", open_memory, "do this", say=said.append)


def test_a_failing_sink_is_told_once_tried_less_and_less_often_and_gets_what_it_missed() -> None:
    memory, said = Memory(), []
    recorder = Recorder([guarded_memory(memory, said)])
    for iteration in range(200):
        memory.broken = 3 <= iteration < 60
        recorder.write("train", {"iteration": iteration})
    # Fails at 3, is tried again 17 records later (20), and 33 after that (53); 118 works.
    assert memory.opened == 4
    assert memory.iterations == list(range(200))
    assert len(said) == 2
    assert "dashboard failed: ConnectionError: no route to host; training goes on" in said[0]
    assert "do this" in said[0]
    assert said[1] == "dashboard works again"


def test_what_is_missing_in_a_sink_at_the_end_is_told() -> None:
    memory, said = Memory(), []
    sink = guarded_memory(memory, said)
    memory.broken = True
    for iteration in range(1500):
        sink.write({"event": "train", "iteration": iteration})
    sink.close()
    assert said[1:] == ["dashboard: 1500 records are missing there; do this"]


def test_the_record_survives_a_full_disk_with_whole_lines_only(tmp_path: Path) -> None:
    said: list[str] = []
    sink = record_sink(tmp_path, said.append)
    records = [{"event": "train", "iteration": number, "text": "x" * 200} for number in range(40)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        for record in records[:30]:
            sink.write(record)
        assert list(read_records(tmp_path / METRICS)) == records[:4]
        assert (tmp_path / METRICS).read_bytes().endswith(b"\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    for record in records[30:]:
        sink.write(record)
    sink.close()
    assert list(read_records(tmp_path / METRICS)) == records
    assert "File too large" in said[0]


def test_a_half_written_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_text('{"event": "train", "iteration": 1}\n{"event": "tra', encoding="utf-8")
    sink = JsonLines(path)
    sink.write({"event": "train", "iteration": 2})
    sink.close()
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2]


def test_series_are_numbers_under_the_names_of_the_record() -> None:
    record = {"event": "train", "time": 1.0, "iteration": 3, "lm loss": 2.5, "grad-norm": None, "seconds-left": 9.0}
    assert series_of(record) == (3, {"lm loss": 2.5})
    check = {"event": "fp8-check", "iteration": 4, "fallen-back-layers": [1, 5], f"{FP8}/clipped": "nan"}
    step, values = series_of(check) or (0, {})
    assert (step, values["fp8/fallen-back-layers"]) == (4, 2.0)
    assert math.isnan(values[f"{FP8}/clipped"])
    assert series_of({"event": "start", "parameters": 5}) is None


def logging_config(**logging: Any) -> Any:
    base = {"tensorboard_dir": "tensorboard", "wandb_project": "tests", "wandb_mode": "offline", "wandb_tags": ["tiny"]}
    return small_config(logging={**base, "wandb_group": "sweep", "wandb_notes": "why", **logging})


def run_some(directory: Path, first: int, last: int, goes_on_from: int | None) -> None:
    """Records of a job from iteration `first` to `last`, a checkpoint of `first + 1` told an iteration later."""
    config = logging_config()
    (directory / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    record, _, *views = sinks_of_run(config, directory, Memory, goes_on_from)
    recorder = Recorder([record, *views])
    recorder.write("start", {"device": "none"})
    for iteration in range(first, last + 1):
        recorder.write("train", {"iteration": iteration, "lm loss": 1 / iteration, "grad-norm": math.inf})
        recorder.write("fp8", {"iteration": iteration, f"{FP8}/amax": 2.0 * iteration, f"{FP8}/scale": 4.0})
        if iteration == first + 2:
            checkpoint = {"path": str(directory), "bytes": 10, "hold-up-seconds": 0.5, "seconds": 1.0}
            recorder.write("checkpoint", {"iteration": iteration - 1, **checkpoint})
    recorder.close()


@pytest.fixture
def client_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client keeps its caches and settings in the test's directory, and says nothing."""
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "client"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


@pytest.mark.usefixtures("client_at_home")
def test_a_run_that_goes_on_continues_its_curves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from megatron_fp8.commands import replay

    directory = tmp_path / "run"
    directory.mkdir()
    run_some(directory, 1, 6, None)
    identity = (directory / "wandb_id.txt").read_text()
    # The job was killed after 6, and goes on from its checkpoint of 3.
    drop_records_after(directory / METRICS, 3)
    lines = (directory / METRICS).read_text().splitlines(keepends=True)
    (directory / METRICS).write_text("".join([lines[0], "something else\n", *lines[1:]]))
    run_some(directory, 4, 8, 3)

    assert "TensorBoard: line 2 of metrics.jsonl is not a record" in capfd.readouterr().err
    assert (directory / "wandb_id.txt").read_text() == identity
    path = only_wandb_file(directory)
    assert identity.strip() in path.name
    history = wandb_history(path)
    assert [row["_step"] for row in history] == list(range(1, 9))
    assert [row["lm loss"] for row in history] == [1 / iteration for iteration in range(1, 9)]
    assert [row[f"{FP8}/amax"] for row in history] == [2.0 * iteration for iteration in range(1, 9)]
    assert history[0]["grad-norm"] == math.inf
    # A checkpoint of 2 that was written during 3 is told at 3.
    assert [row["_step"] for row in history if "checkpoint/bytes" in row] == [3, 6]
    assert history[0]["fp8 map/mlp.linear_fc1/input/amax/values"] == [0, 0, 2.0, 0]

    scalars = tensorboard_scalars(directory / "tensorboard")
    assert [step for step, _, _ in scalars["lm loss"]] == list(range(1, 9))
    assert scalars["lm loss"][4][2] == pytest.approx(1 / 5)

    replay.main([str(directory), "--tensorboard", "--wandb"])
    assert capfd.readouterr().err.count("line 2 of metrics.jsonl is not a record and was skipped") == 2
    assert wandb_history(only_wandb_file(directory)) == history
    assert tensorboard_scalars(directory / "tensorboard") == scalars
    assert len(list((directory / "tensorboard").iterdir())) == 1


@pytest.mark.usefixtures("client_at_home")
def test_wandb_is_told_what_the_run_is_and_what_goes_wrong(tmp_path: Path) -> None:
    config = logging_config(tensorboard_dir=None, wandb_exp_name="first try", wandb_entity="team")
    sinks = sinks_of_run(config, tmp_path, Memory, None)
    recorder = Recorder([sinks[0], sinks[2]])
    recorder.write("start", {"device": "none", "code": "1.0"})
    recorder.write("train", {"iteration": 1, "lm loss": 1.0})
    checkpoint = tmp_path / "checkpoints" / "iter_0000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    recorder.write("checkpoint", {"iteration": 1, "path": str(checkpoint), "bytes": 1, "seconds": 1.0})
    fallback = {"iteration": 1, "layer": 3, "runs in": "bf16", "tensor": "t", "quantity": "q", "value": 1, "limit": 0}
    recorder.write("fp8-fallback", fallback)
    recorder.write("failure", {"kind": "NonFiniteError", "error": "grad-norm is nan"})
    recorder.close()
    kinds: dict[str, list[Any]] = {}
    for message in wandb_messages(only_wandb_file(tmp_path)):
        kinds.setdefault(message.WhichOneof("record_type"), []).append(message)
    run = kinds["run"][0].run
    assert (run.project, run.entity, run.display_name) == ("tests", "team", "first try")
    assert (run.run_group, list(run.tags), run.notes) == ("sweep", ["tiny"], "why")
    told = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert told["model"]["hidden_size"] == 64
    assert [(alert.alert.title, alert.alert.level) for alert in kinds["alert"]] == [
        ("FP8 fallback: layer 3", "WARN"),
        ("Run failed: NonFiniteError", "ERROR"),
    ]
    assert [alert.alert.text for alert in kinds["alert"]] == [
        "iteration 1 | layer 3 runs in bf16 from now on: t q 1 > 0",
        "failed: NonFiniteError: grad-norm is nan",
    ]
    (artifact,) = kinds["artifact"]
    assert artifact.artifact.type == "model"
    assert "iteration-1" in artifact.artifact.aliases
    assert [entry.ref for entry in artifact.artifact.manifest.contents] == [(checkpoint / "manifest.json").as_uri()]
    assert kinds["exit"][0].exit.exit_code == 1
