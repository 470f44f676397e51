"""Owns the making of an output folder: under a hidden name until it is whole, never over something. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_fp8.checkpoint.manifest import sync
from megatron_fp8.errors import BadInputError


def require_new(folder: Path) -> None:
    """BadInputError when there is something at `folder` already, or no directory to make it in."""
    if folder.exists():
        raise BadInputError(f"{folder} exists, and nothing is overwritten: name a folder that does not exist")
    if not folder.absolute().parent.is_dir():
        raise BadInputError(f"there is no directory {folder.absolute().parent} to make {folder.name} in; make it first")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `folder` when all went well and is removed otherwise."""
    require_new(folder)
    temporary = folder.absolute().with_name(f".{folder.absolute().name}.incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.iterdir():
            sync(path)
        temporary.rename(folder)
        sync(folder.absolute().parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
