"""Owns which token files, and which of their documents, a config's training and validation read.

Imports no torch and opens no file.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_fp8.config.problem import Problem
from megatron_fp8.config.schema import DataConfig
from megatron_fp8.data.blend import Blend, BlendError, parse_blend, parse_split

DEFAULT_SPLIT = "969,30,1"


class DataKeyError(Exception):
    """A data key has no meaning; `problem` says which and why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.key} = {problem.value}: {problem.reason}; {problem.use_instead}")
        self.problem = problem


def paths_key(data: DataConfig, name: str) -> str:
    """The key that names the files of `name`, "train" or "valid"."""
    return "data.data_path" if data.data_path else f"data.{name}_data_path"


def train_blend(data: DataConfig) -> Blend:
    """What training reads. Raises DataKeyError where the keys have no meaning."""
    return _blend(data, "train", data.train_data_path)


def valid_blend(data: DataConfig) -> Blend:
    """What validation reads. Raises DataKeyError where the keys have no meaning."""
    return _blend(data, "valid", data.valid_data_path)


def _blend(data: DataConfig, name: str, entries: list[str]) -> Blend:
    key = paths_key(data, name)
    try:
        blend = parse_blend(data.data_path or entries)
    except BlendError as error:
        value = list(data.data_path or entries)
        raise DataKeyError(Problem(key, value, error.reason, error.use_instead)) from error
    if not data.data_path:
        return blend
    text = data.split or DEFAULT_SPLIT
    try:
        train, valid, _ = parse_split(text)
    except BlendError as error:
        raise DataKeyError(Problem("data.split", text, error.reason, error.use_instead)) from error
    return replace(blend, share=train if name == "train" else valid)
