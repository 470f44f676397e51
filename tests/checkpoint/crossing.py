"""One version's part in what two versions of Megatron Core must do alike: writes a run, and puts every tool to a run.

    python -m tests.checkpoint.crossing THEIRS OURS OUT RESULT

writes into THEIRS, and what the tools make of that and of OURS, which the other version wrote, into the file RESULT.
A run is written by four ranks (TP 2 x PP 2) and read by two (DP 2, TP 2) and by one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from megatron_fp8.checkpoint.difference import differences
from megatron_fp8.checkpoint.directory import CheckpointDirectory
from megatron_fp8.checkpoint.saved_model import InferenceSettings, read_config
from megatron_fp8.commands import checkpoint as tool
from tests.command_line import exit_code
from tests.evaluate.models import measured, model_config, write_text
from tests.generate.models import continuations
from tests.hf.our_models import convert, make_parts, train_and_save
from tests.ranks import run_on_ranks

TP2_PP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2]]


def write(root: Path) -> None:
    """`run`: two FP8 steps with FP8 weights; `imported`: its model after a way through Hugging Face's form."""
    write_text(root)
    precision = {"mode": "fp8", "fp8_amax_history_len": 4, "fp8_param_gather": True}
    config = model_config(root, precision=precision, parallel=TP2_PP2)
    run_on_ranks(4, train_and_save, config, root / "run" / "checkpoints")
    convert("export", root / "run", root / "exported", "--dtype", "fp32")
    convert("import", root / "exported", root / "imported")


def resume_and_save(config: Any, load: Path, directory: Path) -> list[str]:
    """Take over a checkpoint in the running world and save at once what was taken over; the notes."""
    from megatron.core import parallel_state

    from megatron_fp8.train.step import IntervalLoss

    parts = make_parts(config, directory)
    progress, notes = parts.checkpointer.load(load, IntervalLoss(parts.device.torch_device), weights_only=False)
    parts.checkpointer._saved_iteration = 0
    parts.checkpointer.after_step(progress, stops=True)
    parallel_state.destroy_model_parallel()
    return notes


def use(root: Path, out: Path) -> dict[str, Any]:
    """What every tool makes of what `write` left in `root`."""
    original = CheckpointDirectory(root / "run" / "checkpoints").path(2)
    saved = read_config(original)
    config = saved.model_copy(update={"parallel": type(saved.parallel)()})
    notes = run_on_ranks(2, resume_and_save, config, original, out / "resumed" / "checkpoints")
    resumed = CheckpointDirectory(out / "resumed" / "checkpoints").path(2)
    convert("export", root / "run", out / "exported", "--dtype", "bf16")
    tp2, one = InferenceSettings(2), InferenceSettings(mode="fp32")
    return {
        "notes": notes,
        # A rank's own state has its coordinates in its name.
        "not equal": [d.name for d in differences(original, resumed) if d.kind != "equal" and "@" not in d.name],
        "equal": sum(d.kind == "equal" for d in differences(original, resumed)),
        "loss of two in fp8": run_on_ranks(2, losses, root / "run", root, tp2),
        "loss": run_on_ranks(1, losses, root / "run", root, one),
        "loss of imported": run_on_ranks(1, losses, root / "imported", root, one),
        "tokens": run_on_ranks(1, tokens, root / "run"),
        "exported": hashlib.sha256((out / "exported" / "model.safetensors").read_bytes()).hexdigest(),
        "verify": checkpoint_tool("verify", root / "run")[0],
        "inspect": checkpoint_tool("inspect", root / "run"),
        "diff": checkpoint_tool("diff", original, root / "imported", "--only", "master."),
    }


def losses(path: Path, root: Path, settings: InferenceSettings) -> list[float]:
    """Of the two files that `write` made, by the model at `path`, in the running world."""
    return [loss.loss for loss in measured(path, [str(root / "one"), str(root / "two")], settings)]


def tokens(path: Path) -> list[list[int]]:
    """The greedy continuations of `PROMPTS`."""
    (answers,) = continuations(path, PROMPTS, [{}])
    return [list(answer.tokens) for answer in answers]


def checkpoint_tool(*arguments: object) -> tuple[int, Any]:
    """(exit code, what it says) of `megatron-fp8 checkpoint ARGUMENTS --json`."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = exit_code(tool.main, *arguments, "--json")
    return code, json.loads(output.getvalue())


def main(theirs: Path, ours: Path, out: Path, result: Path) -> None:
    """As the module's text says."""
    write(theirs)
    found = {place.name: use(place, out / place.name) for place in (ours, theirs)}
    result.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
