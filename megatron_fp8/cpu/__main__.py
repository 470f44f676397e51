"""`python -m megatron_fp8.cpu [-m MODULE | SCRIPT] ARGS...`: runs a GPU program on the CPU stand-in.

Arguments, `__main__` and exit code are as under `python [-m MODULE | SCRIPT] ARGS...`. The GPU reports itself as an
H100. Child processes use the stand-in too.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

USAGE = """usage: python -m megatron_fp8.cpu [-m MODULE | SCRIPT] ARGS...

Runs a Transformer Engine or Megatron Core program that was written for GPUs on this machine's CPU: device
"cuda", torch.cuda and Transformer Engine's compiled extension are emulated, FP8 by value.

  -m MODULE   run a module, as python -m does (pytest and torch.distributed.run too)
  SCRIPT      run a file, as python does
  -h, --help  show this text

Environment: LOCAL_WORLD_SIZE (set by torchrun) is the number of GPUs that the program sees; 1 without it.
"""

_STARTUP = str(Path(__file__).resolve().parent / "startup")


def enter() -> None:
    """Install the stand-in in this process and in its children."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _STARTUP not in folders:
        os.environ["PYTHONPATH"] = os.pathsep.join([_STARTUP, *filter(None, folders)])

    from megatron_fp8.cpu import install

    install(force=True)


def _fail(message: str) -> int:
    print(f"python -m megatron_fp8.cpu: {message}\n\n{USAGE}", file=sys.stderr, end="")
    return 2


def _module_exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def main(arguments: list[str]) -> int:
    """Run the program that `arguments` name; its exceptions propagate. Returns 2 for incorrect usage."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if not arguments:
        return _fail("name a script or -m MODULE to run")
    if arguments[0] == "-m":
        if len(arguments) < 2:
            return _fail("-m needs a module name")
        # Finding a submodule imports its parents, which need the stand-in.
        enter()
        if not _module_exists(arguments[1]):
            return _fail(f"-m {arguments[1]}: no such module in {sys.path[0]} or installed")
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return 0
    if arguments[0].startswith("-"):
        return _fail(f"unknown option {arguments[0]}")
    script = Path(arguments[0])
    if not script.exists():
        return _fail(f"{script}: no such file in {Path.cwd()}")
    sys.argv = arguments
    sys.path[0] = str(script.resolve().parent)
    enter()
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
