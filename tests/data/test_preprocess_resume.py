"""Killed at any time and started again, preprocessing writes the bytes of an uninterrupted run."""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from token_file_reference import decode_token_file

from megatron_fp8.prepare.encode import EncodedBlock, Settings, TokenizerFile
from megatron_fp8.prepare.input_files import find_inputs
from megatron_fp8.prepare.preprocess import Execution, Progress, preprocess
from megatron_fp8.prepare.token_file_writer import TokenFileWriter, WriterBusyError

SETTINGS = Settings(TokenizerFile(None, "ByteLevelTokenizer"), ("text",), append_eod=True, skip_broken_lines=True)
SUFFIXES = ("bin", "idx")


class Stopped(Exception):
    """Ends a process in the middle."""


def write_inputs(folder: Path) -> None:
    """Lines, some of them broken, and texts of several blocks."""
    folder.mkdir()
    lines = [json.dumps({"text": f"Document {number}. " * (number % 9)}) for number in range(400)]
    lines[7] = lines[201] = "broken"
    (folder / "a.jsonl").write_text("\n".join(lines))
    for number in range(30):
        (folder / f"b{number:02}.txt").write_text(f"line {number} of a long text\n" * (20 + number))
    (folder / "c.txt").write_text("the end")


def run(folder: Path, prefix: Path, pace: Execution) -> Progress:
    return preprocess(find_inputs([str(folder)], "auto", ["text"]), str(prefix), SETTINGS, pace, block_bytes=1000)


def content(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}_text_document.{suffix}").read_bytes() for suffix in SUFFIXES]


def test_two_works_under_one_name_are_never_mixed(tmp_path: Path) -> None:
    for name in ("first", "second"):
        lines = [json.dumps({"text": f"{name} {number:04d}"}) for number in range(400)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    first, second, prefix = tmp_path / "first.jsonl", tmp_path / "second.jsonl", tmp_path / "out"
    expected = run(first, tmp_path / "whole", Execution())

    def stop_at(most_documents: int) -> Callable[[EncodedBlock, Progress], None]:
        def stop(encoded: EncodedBlock, totals: Progress) -> None:
            if totals.num_documents > most_documents:
                raise Stopped

        return stop

    with pytest.raises(Stopped):
        run(first, prefix, Execution(save_seconds=0, on_block=stop_at(100)))
    with pytest.raises(Stopped):
        # It has written more than the first by then, and saved nothing.
        run(second, prefix, Execution(on_block=stop_at(200)))
    assert run(first, prefix, Execution()) == expected
    assert content(prefix) == content(tmp_path / "whole")


@pytest.mark.parametrize("stop_after", [1, 20, 30, 45])
def test_work_resumes_from_its_progress_file(stop_after: int, tmp_path: Path) -> None:
    write_inputs(tmp_path / "in")
    expected = run(tmp_path / "in", tmp_path / "whole", Execution())
    blocks = []

    def stop(encoded: EncodedBlock, totals: Progress) -> None:
        blocks.append(encoded)
        if len(blocks) == stop_after:
            raise Stopped

    with pytest.raises(Stopped):
        run(tmp_path / "in", tmp_path / "out", Execution(save_seconds=0, on_block=stop))
    assert not Path(f"{tmp_path}/out_text_document.idx").exists()
    done = []
    again = Execution(on_start=done.append, on_block=lambda encoded, totals: blocks.append(encoded))
    assert run(tmp_path / "in", tmp_path / "out", again) == expected
    # The block at which it stopped was not saved.
    ends = [block.block.end for block in blocks]
    assert ends[stop_after - 1] in ends[stop_after:]
    assert set(ends[: stop_after - 1]).isdisjoint(ends[stop_after:])
    assert (done[0] is None) == (stop_after == 1)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.glob("out*")) == [f"out_text_document.{s}" for s in SUFFIXES]


def test_other_work_starts_again(tmp_path: Path) -> None:
    write_inputs(tmp_path / "in")

    def stop(encoded: EncodedBlock, totals: Progress) -> None:
        if totals.num_documents > 100:
            raise Stopped

    with pytest.raises(Stopped):
        run(tmp_path / "in", tmp_path / "out", Execution(save_seconds=0, on_block=stop))
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "other"}\n')
    done = []
    run(tmp_path / "in", tmp_path / "out", Execution(on_start=done.append))
    assert done == [None]
    assert bytes(decode_token_file(tmp_path / "out_text_document")[0][:-1]) == b"other"


def test_a_process_killed_again_and_again_writes_the_same_bytes(tmp_path: Path) -> None:
    """SIGKILL at random points of the work."""
    write_inputs(tmp_path / "in")
    expected = run(tmp_path / "in", tmp_path / "whole", Execution())
    chance = random.Random(5)
    started = []
    for _ in range(3):
        with start_process(tmp_path) as process:
            assert process.stdout is not None
            started.append(process.stdout.readline())
            # There are about fifty blocks, and three processes do ten of them at most each.
            for _ in range(chance.randrange(3, 10)):
                assert process.stdout.readline().startswith("block"), "it ended before it could be killed"
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "out_text_document.idx").exists()
    assert started[0] == "starts\n"
    assert started[1:] == ["resumes\n"] * 2
    with start_process(tmp_path) as last:
        assert last.stdout is not None
        printed = last.stdout.read()
    assert last.returncode == 0
    assert printed.startswith("resumes\n")
    assert printed.endswith(f"{expected}\n")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def start_process(folder: Path) -> subprocess.Popen[str]:
    """`run` of the inputs in `folder` in another process, which prints a line for each block."""
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "from test_preprocess_resume import Execution, run\n"
        "say = lambda text: print(text, flush=True)\n"
        "pace = Execution(1, 0, lambda done: say('starts' if done is None else 'resumes'), lambda *_: say('block'))\n"
        f"say(run(Path({str(folder / 'in')!r}), Path({str(folder / 'out')!r}), pace))\n"
    )
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def test_the_last_steps_can_be_interrupted_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_inputs(tmp_path / "in")
    run(tmp_path / "in", tmp_path / "whole", Execution())
    for step in range(3):
        calls = []

        def stop(path: Path, target: Path, calls: list[Path] = calls, step: int = step) -> Path:
            # The renames after the progress file says that everything has been read: of tokens and of the index.
            if target.name.startswith("out_") and len(calls) == step:
                raise Stopped
            calls.extend([target] if target.name.startswith("out_") else [])
            path.rename(target)
            return target

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", stop)
            if step < 2:
                with pytest.raises(Stopped):
                    run(tmp_path / "in", tmp_path / "out", Execution())
        run(tmp_path / "in", tmp_path / "out", Execution())
        assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "a", 300) as first:
        first.add_documents(np.array([1, 2], dtype=first.dtype), [2])
        with pytest.raises(WriterBusyError, match="another process is writing"):
            TokenFileWriter(tmp_path / "a", 300).open()
    assert decode_token_file(tmp_path / "a") == [[1, 2]]
