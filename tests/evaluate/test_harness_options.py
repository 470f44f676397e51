"""Options of tools/lm_eval.py that lm-eval would not check are refused before anything is loaded."""

from __future__ import annotations

import pytest

from megatron_fp8.commands.lm_eval import make_parser


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--limit", "-1"),
        ("--limit", "0"),
        ("--limit", "1.5"),
        ("--limit", "inf"),
        ("--limit", "x"),
        ("--num-fewshot", "-1"),
    ],
)
def test_numbers_without_a_meaning_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        make_parser().parse_args(["runs/x", "--tasks", "a", option, value])
    assert f"{value!r} is n" in capsys.readouterr().err


def test_a_number_and_a_share_of_documents() -> None:
    limits = [make_parser().parse_args(["runs/x", "--tasks", "a", "--limit", text]).limit for text in ("10", "0.5")]
    assert limits == [10, 0.5]
