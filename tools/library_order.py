"""Loads CUDA's libraries in every order of imports as in the GPU image, without a GPU, and says from where each came.

    python tools/library_order.py               as the image is: no CUDA toolkit, the packages' libraries in the cache
    python tools/library_order.py --beside DIR  with other libraries in the loader's path, as of a toolkit

Runs with the packages of the image (locks/gpu.lock), as root: each order is a process in a mount namespace, in which
/usr/local/cuda is empty and the loader's cache is made anew. Torch and Transformer Engine's library are the real ones;
neither needs a driver to be loaded. Exit code 1 where an order fails or a library is there twice or from elsewhere.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_fp8.config.load import process_environment

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = Path(sysconfig.get_path("purelib"))
# The last: what the doctor and every run's record do, before Transformer Engine is imported.
ORDERS = {
    "torch, then Transformer Engine": "import torch, transformer_engine.common",
    "Transformer Engine, then torch": "import transformer_engine.common, torch",
    "cuDNN's version, then Transformer Engine": (
        "import torch; torch.backends.cudnn.version(); import transformer_engine.common"
    ),
}
# Variables that choose libraries, or what they do.
_LEFT_OUT = ("CUDA", "CUDNN", "NVTE")
_JUDGE = """
import sys
from pathlib import Path
from megatron_fp8.doctor.library_checks import judged, loaded_files
finding = judged(loaded_files(), Path(torch.__file__).resolve().parents[1])
print(f"{finding.text}; cuDNN {torch.backends.cudnn.version()}")
sys.exit(finding.status.value == "FAULT")
"""


def library_directories(packages: Path = PACKAGES) -> list[Path]:
    """Where NVIDIA's packages have their libraries; docker/Dockerfile gives these to the loader."""
    return sorted(packages.glob("nvidia/*/lib"))


def load(order: str, beside: Sequence[Path], toolkit: Path = Path("/usr/local/cuda")) -> tuple[bool, str]:
    """Whether the imports of `order` went well, and what was found, or the last line of what was written.

    Raises RuntimeError where this process may not make a namespace.
    """
    with tempfile.TemporaryDirectory() as directory:
        empty, cache, wanted = (Path(directory) / name for name in ("empty", "cache", "conf"))
        empty.mkdir()
        wanted.write_text("".join(f"{path}\n" for path in library_directories()), encoding="utf-8")
        hidden = [f"mount --bind {empty} {place}" for place in {toolkit, toolkit.resolve()} if place.is_dir()]
        prepared = [*hidden, f"ldconfig -C {cache} -f {wanted}", f"mount --bind {cache} /etc/ld.so.cache"]
        code = f"{ORDERS[order]}\n{_JUDGE}"
        command = f"{' && '.join(prepared)} || exit 99; exec {shlex.join([sys.executable, '-c', code])}"
        paths = [*map(str, beside), "/usr/local/nvidia/lib", "/usr/local/nvidia/lib64"]
        environment = {"LD_LIBRARY_PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT)}
        kept = {name: value for name, value in process_environment().items() if not name.startswith(_LEFT_OUT)}
        ended = subprocess.run(
            ["unshare", "--mount", "bash", "-c", command],
            env={**kept, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
    if ended.returncode == 99 or "unshare failed" in ended.stderr:
        raise RuntimeError(f"no mount namespace, start it as root: {ended.stderr.strip()}")
    lines = [*ended.stderr.strip().splitlines(), *ended.stdout.strip().splitlines()]
    return ended.returncode == 0, lines[-1] if lines else f"exit code {ended.returncode}"


def main() -> int:
    """Try every order and print what it gave."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path, action="append", default=[], metavar="DIR", help="other libraries")
    settings = parser.parse_args()
    if not (PACKAGES / "transformer_engine" / "wheel_lib").is_dir():
        parser.error(f"{PACKAGES} has no library of Transformer Engine: install locks/gpu.lock")
    results = {order: load(order, settings.beside) for order in ORDERS}
    for order, (well, text) in results.items():
        print(f"{order}: {'ok' if well else 'FAULT'}: {text}")
    return 0 if all(well for well, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
