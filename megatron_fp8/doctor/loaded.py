"""Owns the check of which files CUDA's libraries were loaded from, once torch and Transformer Engine are imported.

A machine may have a library twice: in torch's packages and in a CUDA toolkit, or in packages of the system. Which one
is taken depends on who asks first; parts of two versions of cuDNN do not fit together (`undefined symbol`), and two of
cuBLAS compute different sums.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from megatron_fp8.doctor.finding import Finding, Status, Surroundings

_ADVICE = "leave one: remove the toolkit's or the system's from the image and from LD_LIBRARY_PATH (docker/Dockerfile)"
_LIBRARY = re.compile(r"/(lib(?:cu|nccl|nv)[\w-]*(?:\.alt)?)\.so[\d.]*$")
# The driver's own, which the container's runtime puts beside the image.
_OF_THE_DRIVER = re.compile(r"/(libcuda|libcudadebugger|libnvidia-[\w-]+)\.so[\d.]*$")


def cuda_libraries(surroundings: Surroundings) -> Finding:  # noqa: ARG001 - every check is called alike
    """Whether each of CUDA's libraries is there once, and all of them come from where torch's do."""
    from megatron_fp8 import device

    here = device.prepare()
    import torch
    import transformer_engine.pytorch  # noqa: F401 - for what it loads

    if not here.emulated:
        torch.backends.cudnn.version()
    return judged(loaded_files(), Path(torch.__file__).resolve().parents[1])


def loaded_files(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """The files of CUDA's libraries in a process's memory, sorted."""
    words = (line.split(maxsplit=5) for line in maps.read_text(encoding="utf-8").splitlines())
    paths = {fields[5] for fields in words if len(fields) == 6}
    return sorted(path for path in paths if _LIBRARY.search(path) and not _OF_THE_DRIVER.search(path))


def judged(paths: Iterable[str], packages: Path) -> Finding:
    """A finding on the files `paths`; `packages` is the directory of Python's packages that has torch."""
    files: dict[str, list[str]] = {}
    for path in paths:
        match = _LIBRARY.search(path)
        assert match is not None, path
        files.setdefault(match[1], []).append(path)
    twice = [f"{name} from {' and '.join(found)}" for name, found in files.items() if len(found) > 1]
    strange = [path for found in files.values() for path in found if not Path(path).is_relative_to(packages)]
    if not files:
        return Finding("cuda libraries", Status.ABSENT, "this torch is built for CPUs alone")
    if twice:
        return Finding("cuda libraries", Status.FAULT, f"loaded twice: {'; '.join(twice[:3])}", _ADVICE)
    if strange:
        text = f"not those that torch was installed with: {', '.join(strange[:4])}"
        return Finding("cuda libraries", Status.FAULT, text, _ADVICE)
    return Finding("cuda libraries", Status.OK, f"{len(files)} libraries, each once and from {packages}")
