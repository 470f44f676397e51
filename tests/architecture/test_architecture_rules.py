"""Each rule finds what was planted, and nothing in a tree that keeps to the rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from architecture_rules import all_violations
from source_tree import read_modules

GOOD = {
    "megatron_fp8/__init__.py": "",
    "megatron_fp8/config/__init__.py": "",
    "megatron_fp8/config/schema.py": '"""Schema."""\nVALUE = 1\n',
    "megatron_fp8/config/load.py": '"""Load."""\nimport os\nHOME = os.environ["HOME"]\n',
    "megatron_fp8/device.py": '"""Device."""\nimport torch\nNAME = "cuda" if torch.cuda.is_available() else "cpu"\n',
    "megatron_fp8/precision/__init__.py": (
        '"""Precision."""\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n'
        "    from megatron_fp8.precision.manager import policy\n"
    ),
    "megatron_fp8/precision/policy.py": '"""Policy."""\nfrom megatron_fp8.config.schema import VALUE\n',
    "megatron_fp8/precision/manager.py": '"""Manager."""\nimport torch\nfrom megatron_fp8.precision import policy\n',
    "megatron_fp8/data/check_data.py": '"""Check."""\nfrom megatron_fp8.config import schema\n',
    "megatron_fp8/model/sharding.py": '"""Sharding: no "cuda" here."""\nfrom megatron_fp8.config import schema\n',
    "megatron_fp8/model/build.py": '"""Build."""\nfrom megatron_fp8.precision.manager import policy\n',
    "megatron_fp8/train/state.py": '"""State."""\n',
    "megatron_fp8/train/loop.py": '"""Loop."""\nfrom megatron_fp8.model import build\nfrom . import state\n',
    "tools/bench.py": '"""Bench."""\nimport torch\nfrom megatron_fp8.train import loop\n',
    "pretrain.py": (
        '"""Start."""\nfrom megatron_fp8.config import load\n\n\ndef main():\n'
        "    from megatron_fp8.train.loop import build\n"
    ),
}


def violations(tmp_path: Path, files: dict[str, str]) -> list[str]:
    """What the rules find in the good tree with `files` in place of its own."""
    for name, text in {**GOOD, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return all_violations(read_modules(tmp_path))


def test_a_good_tree_has_no_violations(tmp_path: Path) -> None:
    assert violations(tmp_path, {}) == []


LONG_FUNCTION = '"""Long."""\n\n\ndef long():\n' + "    value = 1\n" * 61
MODEL = "megatron_fp8/model/build.py"
SCHEMA = "megatron_fp8/config/schema.py"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (SCHEMA, '"""S."""\nfrom megatron_fp8 import device\n', f"{SCHEMA}:2: imports megatron_fp8.device, which is 2"),
        (SCHEMA, '"""S."""\nfrom ..train import state\n', f"{SCHEMA}:2: imports megatron_fp8.train.state, which is 1"),
        (
            MODEL,
            '"""B."""\nfrom megatron_fp8.train.loop import x\n',
            "imports megatron_fp8.train.loop, which is 1 above",
        ),
        (
            MODEL,
            '"""B."""\n\n\ndef f():\n    import megatron_fp8.train.loop\n',
            f"{MODEL}:5: imports megatron_fp8.train",
        ),
        (MODEL, '"""B."""\nfrom tools import bench\n', "imports tools.bench"),
        (MODEL, '"""B."""\nimport pretrain\n', "imports pretrain"),
        ("megatron_fp8/misc.py", '"""M."""\n', "megatron_fp8.misc is on no layer"),
        ("megatron_fp8/model/b.py", '"""B."""\nfrom .b import x\nfrom megatron_fp8.model import c\n', None),
        (SCHEMA, '"""S."""\nimport torch\n', f"{SCHEMA}:1: importing it imports megatron_fp8.config.schema -> torch"),
        (SCHEMA, '"""S."""\n\n\ndef f():\n    import torch.nn\n', f"{SCHEMA}:5: imports torch.nn"),
        (
            "megatron_fp8/data/__init__.py",
            '"""D."""\nimport megatron.core\n',
            "megatron_fp8/data/check_data.py:1: importing it imports megatron_fp8.data -> megatron.core",
        ),
        (
            "megatron_fp8/precision/__init__.py",
            '"""P."""\nfrom megatron_fp8.precision import manager\n',
            "policy.py:1: importing it imports megatron_fp8.precision -> megatron_fp8.precision.manager -> torch",
        ),
        (
            "pretrain.py",
            '"""P."""\nfrom megatron_fp8.train.loop import x\n',
            "pretrain.py:1: importing it imports pretrain -> megatron_fp8.train.loop -> ",
        ),
        (MODEL, '"""B."""\nN = 1\n\n\ndef f():\n    global N\n', f"{MODEL}:6: global N"),
        (MODEL, '"""B."""\nimport torch\nX = torch.cuda.device_count()\n', f"{MODEL}:3: .cuda"),
        (MODEL, '"""B."""\nfrom torch import cuda\n', f"{MODEL}:2: imports torch.cuda"),
        (MODEL, '"""B."""\nimport torch.cuda.amp\n', f"{MODEL}:2: imports torch.cuda.amp"),
        (MODEL, '"""B."""\nX = "cuda"\n', f"{MODEL}:2: 'cuda'"),
        (MODEL, '"""B."""\nX = "cuda:1"\n', f"{MODEL}:2: 'cuda:1'"),
        (MODEL, '"""B."""\nX = f"cuda:{1}"\n', f"{MODEL}:2: 'cuda:'"),
        (MODEL, '"""B."""\ndef f(x):\n    return x.cuda()\n', f"{MODEL}:3: .cuda"),
        (MODEL, '"""B."""\ndef f(x):\n    return x.is_cuda\n', f"{MODEL}:3: .is_cuda"),
        ("tools/bench.py", '"""B."""\nX = "cuda"\n', "tools/bench.py:2: 'cuda'"),
        (MODEL, '"""B."""\nimport os\nX = os.environ\n', f"{MODEL}:3: os.environ"),
        (MODEL, '"""B."""\nimport os\nX = os.getenv("A")\n', f"{MODEL}:3: os.getenv"),
        (MODEL, '"""B."""\nfrom os import environ\n', f"{MODEL}:2: imports os.environ"),
        ("pretrain.py", '"""P."""\nimport os\nX = os.environ\n', "pretrain.py:3: os.environ"),
        (MODEL, '"""B."""\n' + "X = 1\n" * 300, f"{MODEL}:1: 301 lines"),
        (MODEL, LONG_FUNCTION, f"{MODEL}:4: long has 61 lines"),
        (MODEL, "X = 1\n", f"{MODEL}:1: no module docstring"),
    ],
)
def test_what_is_planted_is_found(tmp_path: Path, name: str, text: str, expected: str | None) -> None:
    found = violations(tmp_path, {name: text})
    if expected is None:
        assert found == []
    else:
        assert any(expected in violation for violation in found), found


def test_circles_of_imports_are_found_once_and_inside_functions_too(tmp_path: Path) -> None:
    files = {
        "megatron_fp8/model/a.py": '"""A."""\nfrom megatron_fp8.model import b\n',
        "megatron_fp8/model/b.py": '"""B."""\nfrom megatron_fp8.model.c import x\n',
        "megatron_fp8/model/c.py": '"""C."""\n\n\ndef f():\n    from megatron_fp8.model import a\n',
    }
    (found,) = violations(tmp_path, files)
    assert "megatron_fp8.model.a -> megatron_fp8.model.b -> megatron_fp8.model.c -> megatron_fp8.model.a" in found
