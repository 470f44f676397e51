"""States that are kept scaled exist in FP32 one at a time while they are saved and loaded; copies lie on the host."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from tests.checkpoint.training import STEPS_BEFORE, checkpoint_config, train_on_this_rank
from tests.ranks import run_on_ranks

LOW = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16", "main_params_dtype": "fp16"}


class CountsCopies:
    """Counts, while it is entered, the FP32 copies of scaled states: those alive at once, and those that were made."""

    def __enter__(self) -> CountsCopies:
        from transformer_engine.pytorch.optimizers import FusedAdam

        self._adam, self._read = FusedAdam, FusedAdam.get_unscaled_state
        self.alive, self.most, self.made = 0, 0, 0

        def read(adam: Any, parameter: Any, name: str) -> Any:
            copy = self._read(adam, parameter, name)
            if copy.untyped_storage().data_ptr() != adam.state[parameter][name].untyped_storage().data_ptr():
                self.made += 1
                self.alive += 1
                self.most = max(self.most, self.alive)
                weakref.finalize(copy.untyped_storage(), self._ended)
            return copy

        FusedAdam.get_unscaled_state = read
        return self

    def __exit__(self, *raised: object) -> None:
        self._adam.get_unscaled_state = self._read

    def _ended(self) -> None:
        self.alive -= 1


def counted(config: Any, directory: Path) -> dict[str, tuple[int, int, int]]:
    """(copies alive at once at most, alive afterwards, made) of a save and of a load, in the running world."""
    found = {}

    def before(parts: Any) -> None:
        checkpointer = parts.checkpointer
        start, after_step = checkpointer._writer.start, checkpointer.after_step

        def counting_start(*arguments: Any) -> None:
            with CountsCopies() as counts:
                start(*arguments)
            found["save"] = (counts.most, counts.alive, counts.made)

        def after(progress: Any, stops: bool) -> None:
            after_step(progress, stops)
            if progress.state.iteration == STEPS_BEFORE:
                checkpointer._record(checkpointer._writer.wait())
                with CountsCopies() as counts:
                    checkpointer.load(directory / f"iter_{STEPS_BEFORE:07d}", progress.interval, False)
                found["load"] = (counts.most, counts.alive, counts.made)

        checkpointer._writer.start, checkpointer.after_step = counting_start, after

    train_on_this_rank(config, directory, before=before)
    return found


def test_scaled_states_are_copied_one_at_a_time(tmp_path: Path) -> None:
    config = checkpoint_config(model={"num_layers": 1}, precision={"mode": "bf16", **LOW}, training={"eval_iters": 0})
    for found in run_on_ranks(2, counted, config, tmp_path):
        for name in ("save", "load"):
            most, alive, made = found[name]
            assert made > 10
            assert (most, alive) == (1, 0), name


def copies_on_the_host(config: Any) -> list[tuple[str, bool]]:
    """(device of every copy that a writer gets, whether it shares memory with the live state)."""
    found = []

    def probe(parts: Any) -> None:
        contents = list(parts.checkpointer.live.contents({}))
        live = {content.read().untyped_storage().data_ptr() for content in contents if content.boxes}
        for content in contents:
            for piece in content.pieces():
                found.append((piece.values.device.type, piece.values.untyped_storage().data_ptr() in live))

    train_on_this_rank(config, probe=probe, before=lambda parts: probe(parts))
    return found


def test_what_is_written_is_a_copy_on_the_host(tmp_path: Path) -> None:
    """A process that trains on may change the state at once; and nothing of a GPU is touched after a fork."""
    config = checkpoint_config(model={"num_layers": 1}, precision={"mode": "bf16"}, training={"eval_iters": 0})
    (found,) = run_on_ranks(1, copies_on_the_host, config)
    assert len(found) > 10
    assert set(found) == {("cpu", False)}
