"""Owns reading a Hugging Face `config.json`: values with defaults, every mistake collected. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fp8.config.problem import ConfigError, Problem


class HFSettings:
    """The values of a `config.json`, and what is wrong with them."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values = values
        self._path = path
        self.problems: list[Problem] = []

    def get(self, key: str, default: Any = None) -> Any:
        """A value; `default` where it is missing or null."""
        value = self._values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer; without a `default` it has to be there."""
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.reject(key, value, "it has to be a positive integer", "the config.json that belongs to the weights")
        return 1

    def only(self, key: str, wanted: Any, default: Any, reason: str) -> None:
        """Reject every value but `wanted`."""
        value = self.get(key, default)
        if value != wanted:
            self.reject(key, value, reason, f"a model with {key}={wanted!r}")

    def choice(self, key: str, choices: Mapping[str, str], default: str) -> str:
        """What `choices` says about a value; one that it lacks is rejected."""
        value = self.get(key, default)
        if value in choices:
            return choices[value]
        self.reject(key, value, "this project computes no such thing", f"a model with one of {', '.join(choices)}")
        return next(iter(choices.values()))

    def reject(self, key: str, value: Any, reason: str, use: str) -> None:
        """Note a mistake."""
        self.problems.append(Problem(key, value, reason, use, self._path))

    def finish(self) -> None:
        """Raise ConfigError with all mistakes, if there are any."""
        if self.problems:
            raise ConfigError.from_problems(self.problems)


def require(model_values: Mapping[str, Any], wanted: Mapping[str, tuple[Any, ...]], form: str) -> None:
    """Raise ConfigError for every value of our `model` section that is none of those which `form` can express."""
    problems = [
        Problem(
            f"model.{name}",
            model_values[name],
            f"the form of {form} cannot express it",
            f"a model trained with model.{name}={' or '.join(map(str, choices))}",
        )
        for name, choices in wanted.items()
        if model_values[name] not in choices
    ]
    if problems:
        raise ConfigError.from_problems(problems)
