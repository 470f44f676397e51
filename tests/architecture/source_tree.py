"""The project's source as data: modules, their syntax trees, and what each imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "megatron_fp8"


@dataclass(frozen=True)
class Import:
    """One imported name: a dotted path; `lazy` inside a function, or where only type checkers look."""

    name: str
    line: int
    lazy: bool


@dataclass(frozen=True)
class Module:
    """A source file; `name` is dotted and starts with the package, "benchmarks", "tools" or "pretrain"."""

    name: str
    path: str
    text: str
    tree: ast.Module
    imports: tuple[Import, ...]

    @property
    def is_package(self) -> bool:
        """Whether this is the `__init__.py` of a package."""
        return self.path.endswith("__init__.py")


def read_modules(root: Path) -> dict[str, Module]:
    """Every module of the package, the tools and the entry script below `root`, by name."""
    paths = [*root.glob(f"{PACKAGE}/**/*.py"), *root.glob("tools/**/*.py"), root / "pretrain.py"]
    modules = {}
    for path in sorted(path for path in paths if path.exists()):
        relative = path.relative_to(root)
        parts = relative.with_suffix("").parts
        # Scripts in tools/ import the packages beside them by their own names.
        parts = parts[1:] if parts[0] == "tools" and len(parts) > 2 else parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(relative))
        package = name if parts[-1] == "__init__" else name.rpartition(".")[0]
        modules[name] = Module(name, str(relative), text, tree, tuple(_imports(tree, package, lazy=False)))
    return modules


def project_imports(module: Module, modules: dict[str, Module]) -> Iterator[tuple[Import, str]]:
    """(import, module of the project that it names): `from a import b` names `a.b` where that is a module."""
    for imported in module.imports:
        name = imported.name
        while name:
            if name in modules:
                if name != module.name:
                    yield imported, name
                break
            name = name.rpartition(".")[0]


def _imports(node: ast.AST, package: str, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, lazy)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                parents = package.split(".")
                above = parents[: len(parents) - child.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, lazy)
        else:
            types_only = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            inside = lazy or types_only or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(child, package, inside)
