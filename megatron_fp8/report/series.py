"""Types of the registry of series and the lookup by name; the list is `series_registry`. Imports no torch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a series measures. MACHINE: time, speed or memory, which differ between identical runs."""

    VALUE = "value"
    COUNTER = "counter"
    MACHINE = "machine"
    HEAT = "heat map over layers"


class Better(Enum):
    """The direction in which a series improves; a heat map shows the worst value of each interval."""

    LOWER = "lower"
    HIGHER = "higher"


class Section(Enum):
    """Sections of wandb's dashboard, in order."""

    TRAINING = "Training"
    THROUGHPUT = "Throughput"
    NORMS = "Norms"
    FP8 = "FP8 health"


@dataclass(frozen=True)
class Column:
    """A number in a line: `text` is a format string (`{name}`: the series) or a function of the value.

    Values below `minimum` are not shown. A narrow live line keeps the columns with the highest `worth`.
    """

    text: str | Callable[[float], str]
    minimum: float | None = None
    worth: int = 0
    style: str = ""

    def show(self, name: str, value: float | str | None) -> str | None:
        """The text, with `-` for a withheld value; None: not shown."""
        if value is not None:
            value = float(value)  # a string in the record if it is not finite
        if self.minimum is not None and (value is None or value < self.minimum):
            return None
        if callable(self.text):
            return None if value is None else self.text(value)
        text = re.sub(r"\{:.*?\}", "-", self.text) if value is None else self.text
        return text.format(value, name=name)


@dataclass(frozen=True)
class Series:
    """A series or a family of them: `{field}` in `name` stands for any text, `{layer}` for a layer's number.

    `title`: of its figure; series with equal titles share one. `scale`: factor from the record's unit to `unit`.
    `members`: field values that get panels in wandb's dashboard. `event`: kind of the record that holds it.
    `heat_map`: name of the map over layers in wandb.
    """

    name: str
    title: str = ""
    unit: str = ""
    kind: Kind = Kind.VALUE
    better: Better | None = None
    event: str = "train"
    note: str = ""
    scale: float = 1.0
    section: Section | None = None
    members: tuple[Mapping[str, str], ...] = ()
    heat_map: str = ""
    log2: bool = False
    in_report: bool = True
    only_if_changing: bool = False
    in_dashboards: bool = True
    console: Column | None = None
    live: Column | None = None

    def panels(self) -> Iterator[tuple[str, str]]:
        """Titles of wandb's panels and the names of their series."""
        unit = f" ({self.unit})" if self.unit and self.scale == 1 else ""
        for fields in self.members or ([] if "{" in self.name else [{}]):
            name = (self.heat_map or self.name).format_map(fields)
            tensor = f"{fields['tensor']}: " if self.kind is Kind.HEAT else ""
            yield tensor + self.title + unit, name


@dataclass(frozen=True)
class Match:
    """The entry for a name, its position in the registry, and the name's fields."""

    series: Series
    position: int
    fields: Mapping[str, str]

    @property
    def title(self) -> str:
        """Of its figure."""
        return self.series.title.format_map(self.fields)


class Registry:
    """Entries in display order; a name belongs to the first one that matches it."""

    def __init__(self, entries: Iterable[Series]) -> None:
        self.entries = tuple(entries)
        # Exact names take precedence.
        self._patterns = sorted(
            ((_pattern(entry.name), position, entry) for position, entry in enumerate(self.entries)),
            key=lambda item: "{" in item[2].name,
        )
        self._found: dict[str, Match | None] = {}

    def find(self, name: str) -> Match | None:
        """The entry of a series, None if it is not listed."""
        if name not in self._found:
            self._found[name] = self._search(name)
        return self._found[name]

    def _search(self, name: str) -> Match | None:
        for pattern, position, entry in self._patterns:
            if match := pattern.fullmatch(name):
                return Match(entry, position, match.groupdict())
        return None


def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", name)
    fields = [rf"(?P<{field}>{r'[0-9]+' if field in ('layer', 'node') else '.+'})" for field in parts[1::2]]
    texts = [re.escape(text) for text in parts[::2]]
    return re.compile("".join(itertools.chain.from_iterable(itertools.zip_longest(texts, fields, fillvalue=""))))
