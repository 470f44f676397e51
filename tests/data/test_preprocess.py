"""JSON Lines become the documents they hold, whatever the number of workers; broken input is refused."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from token_file_reference import decode_token_file

from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.prepare.encode import BrokenLineError, Settings, TokenizerFile
from megatron_fp8.prepare.input_files import find_inputs
from megatron_fp8.prepare.preprocess import Execution, NoTextError, Progress, preprocess
from megatron_fp8.prepare.token_file_writer import finish
from megatron_fp8.prepare.train_tokenizer import _evenly_spread_texts
from tests.command_line import exit_code

TOOLS = Path(__file__).parents[2] / "tools"
WriteJsonl = Callable[..., Path]


def load_tool(name: str) -> ModuleType:
    """A program of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def settings_of(tokenizer: Tokenizer, **changes: object) -> Settings:
    values = {"keys": ("text",), "append_eod": True, "skip_broken_lines": False} | changes
    return Settings(TokenizerFile(tokenizer.path), **values)


def run(path: Path, prefix: Path, settings: Settings, num_workers: int = 1, block_bytes: int = 2**20) -> Progress:
    files = find_inputs([str(path)], "auto", settings.keys)
    return preprocess(files, str(prefix), settings, Execution(num_workers), block_bytes)


def texts(number: int) -> list[str]:
    return [f"Document {i}: " + "words and 東京 " * (i % 7) for i in range(number)]


def test_documents_are_the_encoded_texts(tokenizer: Tokenizer, write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    path = write_jsonl([{"text": text, "id": i} for i, text in enumerate(texts(20))])
    totals = run(path, tmp_path / "out", settings_of(tokenizer))
    documents = decode_token_file(tmp_path / "out_text_document")
    assert documents == [[*tokenizer.encode(text), tokenizer.eod_id] for text in texts(20)]
    assert totals.num_documents == 20
    assert totals.num_tokens == sum(map(len, documents))
    assert totals.text_bytes == sum(len(text.encode()) for text in texts(20))


def test_end_of_document_only_where_asked(tokenizer: Tokenizer, write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    path = write_jsonl([{"text": text} for text in texts(3)])
    run(path, tmp_path / "out", settings_of(tokenizer, append_eod=False))
    assert decode_token_file(tmp_path / "out_text_document") == [tokenizer.encode(text) for text in texts(3)]


def test_workers_and_blocks_do_not_change_the_bytes(
    tokenizer: Tokenizer, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    path = write_jsonl([{"text": text, "note": text[::-1]} for text in texts(200)])
    settings = settings_of(tokenizer, keys=("text", "note"))
    contents = []
    for number, (num_workers, block_bytes) in enumerate([(1, 2**20), (1, 1), (2, 500)]):
        prefix = tmp_path / str(number)
        run(path, prefix, settings, num_workers, block_bytes)
        names = [f"{key}_document.{suffix}" for key in ("text", "note") for suffix in ("bin", "idx")]
        contents.append([Path(f"{prefix}_{name}").read_bytes() for name in names])
    assert contents[0] == contents[1] == contents[2]


def test_ids_above_uint16_survive(tokenizer: Tokenizer, write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    content = json.loads(Path(tokenizer.path).read_text(encoding="utf-8"))
    (moved,) = tokenizer.encode("d")
    name = next(key for key, token in content["model"]["vocab"].items() if token == moved)
    content["model"]["vocab"][name] = 70_000
    (tmp_path / "wide.json").write_text(json.dumps(content), encoding="utf-8")
    settings = Settings(TokenizerFile(str(tmp_path / "wide.json")))
    run(write_jsonl([{"text": "d"}]), tmp_path / "out", settings)
    assert decode_token_file(tmp_path / "out_text_document") == [[70_000]]


def test_empty_documents_and_blank_lines_are_skipped(
    tokenizer: Tokenizer, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    path = write_jsonl([{"text": "one"}, {"text": ""}, {"text": "two"}])
    path.write_text(path.read_text() + "\n  \n", encoding="utf-8")
    totals = run(path, tmp_path / "out", settings_of(tokenizer))
    assert (totals.num_documents, totals.by_key["text"].num_empty, totals.num_broken) == (2, 1, 0)
    assert len(decode_token_file(tmp_path / "out_text_document")) == 2


BROKEN = {
    "not JSON": (b'{"text": "cut', "not JSON"),
    "not UTF-8": (b'{"text": "\xff\xfe"}', "not JSON"),
    "not an object": (b'["text"]', "a JSON list, not an object"),
    "no key": (b'{"body": "text", "id": 3}', "no key 'text'; it has ['body', 'id']"),
    "not a text": (b'{"text": 3}', "'text' is int, not text"),
    "half a surrogate pair": (b'{"text": "\\ud800"}', "is not valid Unicode"),
}


@pytest.mark.parametrize(
    ("kind", "num_workers"), [*((kind, 1) for kind in BROKEN), pytest.param("no key", 2, marks=pytest.mark.slow)]
)
def test_broken_lines_stop_or_are_counted(kind: str, num_workers: int, tokenizer: Tokenizer, tmp_path: Path) -> None:
    line, reason = BROKEN[kind]
    path = tmp_path / "input.jsonl"
    path.write_bytes(b'{"text": "good"}\n' * 2 + line + b'\n{"text": "good"}\n')
    with pytest.raises(BrokenLineError) as caught:
        run(path, tmp_path / "out", settings_of(tokenizer), num_workers, block_bytes=20)
    assert caught.value.line_number == 3
    assert reason in caught.value.reason
    assert list(tmp_path.glob("out*")) == []
    settings = settings_of(tokenizer, skip_broken_lines=True)
    totals = run(path, tmp_path / "out", settings, num_workers, block_bytes=20)
    assert (totals.num_documents, totals.num_broken) == (3, 1)
    assert totals.broken[0].startswith(f"{path}, line 3: ")


def test_input_without_text_writes_nothing(tokenizer: Tokenizer, write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    settings = settings_of(tokenizer, skip_broken_lines=True)
    with pytest.raises(NoTextError, match=r"the first: .*input.jsonl, line 1: no key 'text'"):
        run(write_jsonl([{"body": "x"}]), tmp_path / "out", settings)
    assert list(tmp_path.glob("out*")) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--input": "absent.jsonl"}, ["--input absent.jsonl", "does not exist"]),
        ({"--input": "nothing*.jsonl"}, ["--input nothing*.jsonl", "no file matches nothing*.jsonl"]),
        (
            {"--eod-token": "</doc>"},
            ["--eod-token </doc>", "has no end-of-document token", "set --eod-token to"],
        ),
        ({"--train-bpe": "20"}, ["--train-bpe 20", "at least 257"]),
        ({"--tokenizer-model": "absent.json"}, ["--tokenizer-model absent.json", "does not exist"]),
        ({"--output-prefix": "no/such/out"}, ["--output-prefix no/such/out", "no directory no/such"]),
        ({"--json-keys": "body"}, ["--json-keys body", "line 1", "it has ['text']"]),
        ({"--workers": "0"}, ["--workers 0", "at least 1"]),
    ],
)
def test_wrong_arguments_end_with_code_2_and_name_the_flag(
    change: dict[str, str],
    words: list[str],
    tokenizer: Tokenizer,
    write_jsonl: WriteJsonl,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = {
        "--input": str(write_jsonl([{"text": "one"}])),
        "--output-prefix": str(tmp_path / "out"),
        "--tokenizer-model": tokenizer.path,
    } | change
    assert exit_code(load_tool("preprocess_data").main, *(part for flag in flags.items() for part in flag)) == 2
    printed = " ".join(capsys.readouterr().err.split())
    for word in words:
        assert word in printed
    assert list(tmp_path.glob("out*")) == []


def test_the_tool_writes_files_and_a_summary(
    tokenizer: Tokenizer, write_jsonl: WriteJsonl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl([{"text": "one"}, ["broken"], {"text": ""}, {"text": "two"}])
    flags = {
        "--input": str(path),
        "--output-prefix": str(tmp_path / "out"),
        "--tokenizer-model": tokenizer.path,
    }
    arguments = [part for flag in flags.items() for part in flag]
    tool = load_tool("preprocess_data")
    assert exit_code(tool.main, *[*arguments, "--append-eod", "--skip-broken-lines"]) == 0
    assert len(decode_token_file(tmp_path / "out_text_document")) == 2
    printed = capsys.readouterr().out
    assert "--append-eod" not in printed
    assert exit_code(tool.main, *[*arguments, "--skip-broken-lines", "--overwrite"]) == 0
    assert "warning: documents are not separated" in capsys.readouterr().out
    (tmp_path / "in").mkdir()
    path.replace(tmp_path / "in" / "good.jsonl")
    (tmp_path / "in" / "part-00002").write_text("no text")
    arguments[1] = str(tmp_path / "in")
    assert exit_code(tool.main, *[*arguments, "--skip-broken-lines", "--overwrite"]) == 0
    named = capsys.readouterr().out
    assert "files read as jsonl: 1\n" in named
    assert f"skipped: {tmp_path}/in/part-00002: no known suffix" in named
    for part in ("documents 2", "longest document", "empty documents 1", "broken lines 1", "line 2: a JSON list"):
        assert part in printed


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the program prints when it ends with code 2 before any work."""
    assert exit_code(load_tool("preprocess_data").main, *arguments) == 2
    return " ".join(capsys.readouterr().err.split())


def test_finished_files_are_replaced_only_when_asked(
    tokenizer: Tokenizer,
    write_jsonl: WriteJsonl,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, prefix = write_jsonl([{"a": "one", "b": "two"}]), tmp_path / "out"
    arguments = ["--input", str(path), "--output-prefix", str(prefix), "--tokenizer-model", tokenizer.path]
    arguments += ["--json-keys", "a", "b"]
    tool = load_tool("preprocess_data")
    finished: list[str] = []

    def stop(prefix: str, dtype: object) -> None:
        # As if it were killed between the two pairs of the end.
        if finished:
            raise KeyboardInterrupt
        finished.append(prefix)
        finish(prefix, dtype)

    with monkeypatch.context() as patch:
        patch.setattr("megatron_fp8.prepare.preprocess.finish", stop)
        assert exit_code(tool.main, *arguments) == 130
    assert (tmp_path / "out_a_document.idx").exists()
    assert not (tmp_path / "out_b_document.idx").exists()
    # Other work would replace the first; the same work resumes.
    assert f"{prefix}_a_document.bin" in refusal([*arguments, "--append-eod"], capsys)
    assert exit_code(tool.main, *arguments) == 0
    printed = refusal(arguments, capsys)
    assert f"{prefix}_a_document.bin, {prefix}_a_document.idx, {prefix}_b_document.bin" in printed
    assert "--overwrite" in printed
    path.write_text('{"a": "three", "b": "four"}\n')
    assert decode_token_file(tmp_path / "out_a_document") == [tokenizer.encode("one")]
    assert exit_code(tool.main, *[*arguments, "--overwrite"]) == 0
    assert decode_token_file(tmp_path / "out_a_document") == [tokenizer.encode("three")]


def test_gpt2s_two_files_become_a_tokenizer(
    tokenizer: Tokenizer, write_jsonl: WriteJsonl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = json.loads(Path(tokenizer.path).read_text(encoding="utf-8"))["model"]
    (tmp_path / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    (tmp_path / "gpt2-merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
    path, prefix = write_jsonl([{"text": text} for text in texts(9)]), tmp_path / "out"
    arguments = ["--input", str(path), "--output-prefix", str(prefix), "--tokenizer-type", "GPT2BPETokenizer"]
    vocabulary = ["--vocab-file", str(tmp_path / "gpt2-vocab.json")]
    assert "give both" in refusal(arguments, capsys)
    assert "give both" in refusal([*arguments, *vocabulary], capsys)
    arguments += [*vocabulary, "--merge-file", str(tmp_path / "gpt2-merges.txt")]
    assert exit_code(load_tool("preprocess_data").main, *arguments) == 0
    assert f"converted --vocab-file and --merge-file to {prefix}_tokenizer.json" in capsys.readouterr().out
    assert decode_token_file(tmp_path / "out_text_document") == [tokenizer.encode(text) for text in texts(9)]
    assert Tokenizer.load(f"{prefix}_tokenizer.json").eod_id == tokenizer.eod_id
    assert exit_code(load_tool("preprocess_data").main, *[*arguments, "--overwrite"]) == 0
    other = [*arguments, "--overwrite", "--tokenizer-model", tokenizer.path]
    Path(tokenizer.path).with_name("own.json").write_text("{}")
    assert "exists and is not the tokenizer of" in refusal(
        [*other[:-1], str(Path(tokenizer.path).with_name("own.json"))], capsys
    )
    alone = ["--input", str(path), "--output-prefix", str(tmp_path / "alone"), "--tokenizer-model", vocabulary[1]]
    assert "--vocab-file and --merge-file convert" in refusal(alone, capsys)


def test_megatrons_json_of_ranks_is_refused_with_what_to_use(
    write_jsonl: WriteJsonl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = tmp_path / "multiMixV8.json"
    ranks.write_text(json.dumps([{"rank": 0, "token_bytes": "AA==", "token_str": ""}]))
    arguments = ["--input", str(write_jsonl([{"text": "a"}])), "--output-prefix", str(tmp_path / "out")]
    printed = refusal([*arguments, "--tokenizer-model", str(ranks)], capsys)
    assert "Megatron-LM's TikTokenizer" in printed
    assert ".tiktoken" in printed


@pytest.mark.parametrize(("name", "module"), [("preprocess_data", "preprocess"), ("data", "data")])
def test_an_interrupt_while_modules_are_loaded_ends_with_one_line(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == f"megatron_fp8.commands.{module}":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, f"megatron_fp8.commands.{module}", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert exit_code(load_tool(name).main, *["--help"]) == 130
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("interrupted")
    assert printed.err.count("\n") == 1


def test_a_tokenizer_is_trained_on_the_inputs_and_then_used(
    write_jsonl: WriteJsonl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl([{"text": "to be or not to be " * 20}, {"text": "that is the question " * 20}])
    flags = ["--input", str(path), "--tokenizer-model", str(tmp_path / "own.json"), "--train-bpe", "280"]
    tool = load_tool("preprocess_data")
    for prefix in ("first", "second"):
        assert exit_code(tool.main, *[*flags, "--output-prefix", str(tmp_path / prefix)]) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"wrote {tmp_path}/own.json: ") == 1
    assert printed.count("used, not trained again") == 1
    assert "too few pairs to merge" not in printed
    few = ["--train-bpe", "9000", "--tokenizer-model", str(tmp_path / "few.json")]
    assert exit_code(tool.main, *[*flags, *few, "--output-prefix", str(tmp_path / "few")]) == 0
    assert "too few pairs to merge for --train-bpe 9,000" in capsys.readouterr().out
    tokenizer = Tokenizer.load(tmp_path / "own.json")
    assert 257 < tokenizer.vocab_size <= 280
    expected = [tokenizer.encode("to be or not to be " * 20), tokenizer.encode("that is the question " * 20)]
    for prefix in ("first", "second"):
        assert decode_token_file(tmp_path / f"{prefix}_text_document") == expected
    assert exit_code(tool.main, *flags[:-1], "270", "--output-prefix", tmp_path / "third") == 2
    assert "more than --train-bpe 270" in capsys.readouterr().err


def test_a_tokenizer_is_trained_on_an_evenly_spread_part(tmp_path: Path) -> None:
    for name in "abcdefgh":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name * 100}) + "\n")
    files = find_inputs([str(tmp_path)], "auto", ["text"])
    settings = Settings(TokenizerFile(None, "ByteLevelTokenizer"))
    total_bytes = sum(file.size_bytes for file in files)
    assert [text[0] for text in _evenly_spread_texts(files, settings, total_bytes, None)] == list("abcdefgh")
    assert [text[0] for text in _evenly_spread_texts(files, settings, total_bytes // 2, None)] == list("abdfh")


@pytest.mark.parametrize("name", ["preprocess_data", "prepare_quickstart", "evaluate", "lm_eval", "generate"])
def test_the_tools_help_needs_neither_torch_nor_transformer_engine(name: str) -> None:
    program = (
        "import runpy, sys\n"
        "for name in ('torch', 'transformer_engine', 'megatron'): sys.modules[name] = None\n"
        f"sys.argv = ['{name}', '--help']\n"
        f"runpy.run_path({str(TOOLS / name)!r} + '.py', run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: {name}")
