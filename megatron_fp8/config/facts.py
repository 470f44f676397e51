"""What every rule about a config works with: the facts it reads, the finding it reports, and the values to use instead.

A suggested value is never computed from a formula alone: it is put into the config and all rules are asked
again, so that following it never leads to the next mistake. Imports no torch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_fp8.config.fields import config_fields
from megatron_fp8.config.problem import Problem, show_value
from megatron_fp8.config.run_start import START, Position
from megatron_fp8.config.schema import Config

WORLD_SIZE = "world_size"
MAX_CANDIDATES = 64
MAX_STEPS_TRIED = 8


@dataclass(frozen=True)
class Facts:
    """A config and what is known about its surroundings; None: not known (yet).

    `vocab_size`: tokens of the tokenizer, before padding. `position`: where the run goes on.
    """

    config: Config
    world_size: int | None
    vocab_size: int | None
    position: Position = START

    def get(self, key: str) -> Any:
        """The value of a dotted key, or the world size."""
        if key == WORLD_SIZE:
            return self.world_size
        section, _, name = key.partition(".")
        return getattr(getattr(self.config, section), name)

    def with_value(self, key: str, value: Any) -> Facts:
        """The same facts with another value for `key`."""
        if key == WORLD_SIZE:
            return replace(self, world_size=value)
        section_name, _, name = key.partition(".")
        section = getattr(self.config, section_name).model_copy(update={name: value})
        return replace(self, config=self.config.model_copy(update={section_name: section}))

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        parallel = self.config.parallel
        return (
            parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
        )

    @property
    def data_parallel_size(self) -> int | None:
        """Copies of the model, or None where the world size is unknown or does not divide."""
        if self.world_size is None or self.world_size % self.model_parallel_size:
            return None
        return self.world_size // self.model_parallel_size


@dataclass(frozen=True)
class Alternative:
    """Values of one key that may put a finding right, nearest first; at most `most` of them are named."""

    key: str
    candidates: Sequence[Any]
    most: int = 2


@dataclass(frozen=True)
class Finding:
    """One mistake found by the rule named `rule`. `value` is what is shown (None: the key's own value).

    `otherwise` is what to do when no single key puts it right.
    """

    rule: str
    key: str
    reason: str
    alternatives: tuple[Alternative, ...] = ()
    otherwise: str = ""
    value: Any = None

    @property
    def identity(self) -> tuple[str, str]:
        """What makes two findings, under two configs, the same mistake."""
        return self.rule, self.key


Rules = Callable[[Facts], Iterable[Finding]]


def to_problem(finding: Finding, facts: Facts, rules: Rules, origins: Mapping[str, str]) -> Problem:
    """The report of `finding`, with suggestions that `rules` accept, written as overrides."""
    uses = []
    for alternative in finding.alternatives:
        values = accepted_values(finding, alternative, facts, rules)
        if values:
            uses.append(" or ".join(_as_written(alternative.key, value) for value in values))
    if not uses and (step := _step_towards(finding, facts, rules)):
        uses.append(step)
    if not uses or finding.otherwise:
        uses.append(finding.otherwise or f"a different value of {finding.key}")
    value = facts.get(finding.key) if finding.value is None else finding.value
    origin = origins.get(finding.key, "")
    return Problem(finding.key, value, finding.reason, "; or ".join(uses), origin)


def _as_written(key: str, value: Any) -> str:
    # Without spaces a list is one argument of a command line.
    return f"{value} ranks" if key == WORLD_SIZE else f"{key}={show_value(value).replace(', ', ',')}"


def _step_towards(finding: Finding, facts: Facts, rules: Rules) -> str | None:
    """The change that removes `finding` with the fewest other keys to change after it, and which those are."""
    before = {other.identity for other in rules(facts)}
    best: tuple[int, str] | None = None
    for alternative in finding.alternatives:
        for value in _allowed(alternative, MAX_STEPS_TRIED):
            after = list(rules(facts.with_value(alternative.key, value)))
            if finding.identity in {other.identity for other in after}:
                continue
            keys = sorted({other.key for other in after if other.identity not in before})
            if best is None or len(keys) < best[0]:
                too = " and ".join(keys)
                best = len(keys), f"{_as_written(alternative.key, value)} (and then another {too})"
    return best[1] if best else None


def accepted_values(finding: Finding, alternative: Alternative, facts: Facts, rules: Rules) -> list[Any]:
    """The first of the candidates that the schema allows, that remove `finding` and bring no new one."""
    before = {other.identity for other in rules(facts)}

    def accepted(value: Any) -> bool:
        after = {other.identity for other in rules(facts.with_value(alternative.key, value))}
        return finding.identity not in after and after <= before

    return list(itertools.islice(filter(accepted, _allowed(alternative, MAX_CANDIDATES)), alternative.most))


def _allowed(alternative: Alternative, most: int) -> Iterator[Any]:
    """The first candidates, without those outside the key's range."""
    spec = config_fields().get(alternative.key)
    for value in itertools.islice(alternative.candidates, most):
        if spec is None or spec.allows(value):
            yield value


def multiples(value: int, step: int = 1, least: int = 1) -> list[int]:
    """Multiples of `step` other than `value`, nearest first, below and above in turn, from `least` on."""
    below = value - 1 - (value - 1) % step
    above = value - value % step + step

    pairs = itertools.zip_longest(
        itertools.islice(range(below, max(least, 1) - 1, -step), MAX_CANDIDATES // 2),
        range(above, above + step * (MAX_CANDIDATES // 2), step),
    )
    return [candidate for pair in pairs for candidate in pair if candidate is not None]


@functools.lru_cache(maxsize=1024)
def divisors(number: int, near: int) -> tuple[int, ...]:
    """Divisors of `number` other than `near`, nearest to `near` first."""
    small = [divisor for divisor in range(1, min(number, 4096) + 1) if number % divisor == 0]
    found = {*small, *(number // divisor for divisor in small)} - {near}
    return tuple(sorted(found, key=lambda divisor: (abs(divisor - near), divisor)))
