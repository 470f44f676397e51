"""Installs the stand-in in the children of `python -m megatron_fp8.cpu` (multiprocessing's spawn, torchrun's workers).

Python runs this file at startup if its directory is on PYTHONPATH. The stand-in is installed once torch is imported.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent


def _load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _enter(_torch: ModuleType) -> None:
    root = str(_HERE.parents[2])
    if importlib.util.find_spec("megatron_fp8") is None:
        sys.path.append(root)
    from megatron_fp8.cpu.__main__ import enter

    enter()


def _run_shadowed_sitecustomize() -> None:
    for folder in sys.path:
        file = Path(folder or ".").resolve() / "sitecustomize.py"
        if file.parent != _HERE and file.is_file():
            _load("sitecustomize_of_this_python", file)
            return


_run_shadowed_sitecustomize()
# By its path: the package would import torch, which must remain the program's choice.
_load("_megatron_fp8_import_hook", _HERE.parent / "import_hook.py").patch_after_import({"torch": _enter})
