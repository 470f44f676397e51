"""The project keeps to its architecture."""

from __future__ import annotations

from pathlib import Path

from architecture_rules import all_violations
from source_tree import read_modules

ROOT = Path(__file__).parents[2]


def test_the_project_keeps_to_its_architecture() -> None:
    modules = read_modules(ROOT)
    assert {"pretrain", "megatron_fp8.config.schema", "tools.preprocess_data"} <= set(modules)
    violations = all_violations(modules)
    assert not violations, "\n" + "\n".join(violations)
