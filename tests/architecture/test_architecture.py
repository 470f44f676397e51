"""The project keeps to its architecture."""

from __future__ import annotations

import re
from pathlib import Path

from architecture_rules import all_violations
from source_tree import read_modules

ROOT = Path(__file__).parents[2]


def test_the_project_keeps_to_its_architecture() -> None:
    modules = read_modules(ROOT)
    assert {"pretrain", "megatron_fp8.config.schema", "tools.preprocess_data"} <= set(modules)
    violations = all_violations(modules)
    assert not violations, "\n" + "\n".join(violations)


def test_the_page_of_architecture_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = [name.rstrip("/") for name in re.findall(r"`([\w./*-]+/[\w./*-]*)`", page)]
    assert "train/loop.py" in names
    # Relative to the repository or to the package, a module with or without its suffix; `kernels/` is a part of `cpu/`.
    folders = (ROOT, ROOT / "megatron_fp8", ROOT / "megatron_fp8" / "cpu")
    missing = [
        name for name in names if not any(list(folder.glob(name + s)) for folder in folders for s in ("", ".py"))
    ]
    assert not missing
