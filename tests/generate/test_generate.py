"""Text that a checkpoint continues: as transformers does, with a cache or without, alone or beside others."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp8.checkpoint.saved_model import InferenceSettings
from megatron_fp8.commands import generate as tool
from megatron_fp8.data.tokenizer import Tokenizer
from megatron_fp8.generate.generation import Continuation, Limits, Sampling
from megatron_fp8.prepare.train_tokenizer import train_bpe
from tests.e2e.launch import ROOT, run
from tests.generate.models import SECTIONS, SEQ_LENGTH, VOCAB_SIZE, continuations, state_after_an_exception
from tests.hf.our_models import convert, train_and_save
from tests.ranks import run_on_ranks
from tests.small_run import small_config

NUM_TOKENS = 10
TEXT = "for batch in data: loss = model(batch)"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Both models' runs (`NAME-run`), and as they go out in FP32 (`NAME`)."""
    root = tmp_path_factory.mktemp("generating")
    train_bpe([TEXT], VOCAB_SIZE, root / "tokenizer.json")
    for name, (world_size, sections) in SECTIONS.items():
        config = small_config(
            **sections,
            training={"global_batch_size": 4, "train_iters": 2},
            optimizer={"lr": 1e-2},
            data={"tokenizer_model": str(root / "tokenizer.json")},
        )
        run_on_ranks(world_size, train_and_save, config, root / f"{name}-run" / "checkpoints")
        convert("export", root / f"{name}-run", root / name, "--dtype", "fp32")
    return root


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of unequal lengths; with each of them one reaches the last position."""
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 1, 12, SEQ_LENGTH - NUM_TOKENS)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def theirs(folder: Path, prompt: list[int]) -> list[int]:
    """The greedy continuation by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", SECTIONS)
def test_greedy_text_is_that_of_transformers(root, prompts, name) -> None:
    asked: list[dict[str, Any]] = [{}, {"use_cache": False}]
    ((cached, uncached),) = run_on_ranks(1, continuations, root / f"{name}-run", prompts, asked)
    expected = [theirs(root / name, prompt) for prompt in prompts]
    assert [continuation.tokens for continuation in cached] == expected
    assert uncached == cached
    assert len({tuple(tokens) for tokens in expected}) == len(prompts)


def test_two_ranks_that_share_the_model_give_the_same_text(root, prompts) -> None:
    (alone,) = run_on_ranks(1, continuations, root / "llama-run", prompts, [{}])
    shared = run_on_ranks(2, continuations, root / "llama-run", prompts, [{}])
    assert shared == [alone, alone]


@pytest.mark.parametrize(
    "settings",
    [
        InferenceSettings(),
        InferenceSettings(mode="bf16"),
        # Scales of blocks of a token's own: what stands beside it does not matter.
        InferenceSettings(fp8_recipe="blockwise"),
    ],
    ids=["fp8", "bf16", "fp8 blockwise"],
)
def test_the_cache_and_other_prompts_change_nothing_in_low_precision(root, prompts, settings) -> None:
    asked: list[dict[str, Any]] = [{}, {"use_cache": False}, *({"prompts": [prompt]} for prompt in prompts)]
    ((together, uncached, *single),) = run_on_ranks(1, continuations, root / "llama-run", prompts, asked, settings)
    assert uncached == together
    assert [continuation for (continuation,) in single] == together


def test_samples_depend_on_the_seed_and_not_on_their_neighbours(root, prompts) -> None:
    sampled = {"sampling": Sampling(temperature=0.9, top_k=50, top_p=0.95), "seed": 7}
    asked = [sampled, sampled, {**sampled, "seed": 8}, {**sampled, "prompts": prompts[1:2], "seed": 8}]
    ((first, again, other, alone),) = run_on_ranks(1, continuations, root / "llama-run", prompts, asked)
    assert again == first
    assert other != first
    # The second of several draws as the first of a seed one higher does.
    assert alone[0] == first[1]


def test_a_text_ends_at_the_end_token_the_limit_or_the_last_position(root, prompts) -> None:
    ((unlimited,),) = run_on_ranks(1, continuations, root / "llama-run", prompts, [{"limits": Limits(100)}])
    assert [len(c.tokens) for c in unlimited] == [SEQ_LENGTH - len(prompt) for prompt in prompts]
    assert {c.ending for c in unlimited} == {"positions"}
    end = unlimited[0].tokens[3]
    before = unlimited[0].tokens.index(end)
    asked = [{"limits": Limits(100, end)}, {"limits": Limits(2)}, {"limits": Limits(0)}]
    ((ended, short, none),) = run_on_ranks(1, continuations, root / "llama-run", prompts[:1], asked)
    assert ended == [Continuation(unlimited[0].tokens[:before], "end of document")]
    assert short == [Continuation(unlimited[0].tokens[:2], "max_new_tokens")]
    assert none == [Continuation([], "max_new_tokens")]


def test_an_exception_in_the_middle_leaves_the_model_as_it_was(root) -> None:
    ((before, after),) = run_on_ranks(1, state_after_an_exception, root / "llama-run", [1, 2, 3])
    assert before == [True, True]
    assert after == before


def test_the_tool_prints_what_the_model_says(root, tmp_path) -> None:
    tokenizer = Tokenizer.load(root / "tokenizer.json")
    tokens = theirs(root / "gpt2", tokenizer.encode("for batch"))
    assert tokenizer.eod_id not in tokens
    command = [sys.executable, ROOT / "tools" / "generate.py", root / "gpt2-run", "--precision", "fp32", "--greedy"]
    (tmp_path / "prompts.txt").write_text("data\n\nfor batch\n", encoding="utf-8")
    options = ["--max-new-tokens", str(NUM_TOKENS), "--prompts-file", "prompts.txt", "--json"]
    ended = run([*command, "for batch", *options], tmp_path)
    assert ended.code == 0, ended.output
    records = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [record["prompt"] for record in records] == ["for batch", "data", "for batch"]
    assert records[0] == records[2]
    assert records[0]["tokens"] == tokens
    assert records[0]["ending"] == "max_new_tokens"
    whole = tokenizer.decode([*tokenizer.encode("for batch"), *tokens])
    assert "for batch" + records[0]["text"] == whole
    assert "30 tokens, " in ended.stderr


def test_the_tool_refuses_what_cannot_be_with_what_to_use_instead(root, tmp_path, capsys) -> None:
    run_directory = str(root / "llama-run")
    long = "x" * 40
    for arguments, text in (
        ([str(tmp_path)], "there is no checkpoint at"),
        ([run_directory, "a", long], "prompt 2 has 40 tokens"),
        ([run_directory, "--tokenizer", str(tmp_path / "none.json")], "none.json does not exist"),
        ([run_directory, "--iteration", "9"], "there is no checkpoint of iteration 9"),
        ([run_directory, "--prompts-file", str(tmp_path / "none.txt")], "none.txt cannot be read"),
        # How Python gives bytes of the command line that are no UTF-8.
        ([run_directory, "a", "\udcff"], "prompt 2 is not valid Unicode"),
        ([str(root / "gpt2-run"), "--precision", "fp8"], "precision.fp8_recipe=tensorwise"),
    ):
        with pytest.raises(SystemExit, match="2"):
            tool.main(arguments)
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        tool.main([run_directory, "--top-p", "1.5"])
    assert "'1.5' is not a number from 0.0 to 1.0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        tool.main([run_directory, "--seed", str(2**64)])
    assert "is not a number from 0 to" in capsys.readouterr().err


def test_prompts_of_a_file_are_its_lines(tmp_path) -> None:
    path = tmp_path / "prompts.txt"
    mark, separator = "\N{ZERO WIDTH NO-BREAK SPACE}", "\N{LINE SEPARATOR}"
    path.write_bytes(f"{mark}one{separator}and a half\r\n\n  \nlast".encode())
    assert tool._prompts_of(str(path)) == [f"one{separator}and a half", "last"]


def test_make_train_ends_with_a_call_that_the_tool_understands() -> None:
    # The tests may run under `make` themselves.
    ended = run(["make", "--no-print-directory", "--dry-run", "train"], ROOT)
    assert ended.code == 0, ended.output
    python, program, newest_run, *rest = shlex.split(ended.stdout.splitlines()[-1])
    assert (python, program) == (".venv/bin/python", "tools/generate.py")
    settings = tool.make_parser().parse_intermixed_args([newest_run, *rest])
    assert settings.prompts == ["def __init__(", "if"]
    # Checkpoints that are not where that line looks are left alone.
    elsewhere = run(["make", "--dry-run", "train", "ARGS=run.root=/elsewhere"], ROOT)
    assert "generate.py" not in elsewhere.stdout
