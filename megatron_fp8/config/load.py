"""Loads a config: files, their bases, the command line, the defaults.

Reports every mistake at once. What must hold between values is in `config/check.py`. This is the one module
of the config that looks at the environment. Imports no torch.
"""

from __future__ import annotations

import difflib
import itertools
import math
import os
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_fp8.config.accelerate import read_accelerate
from megatron_fp8.config.fields import FieldSpec, ValueMismatchError, config_fields, section_doc, to_value
from megatron_fp8.config.foreign_keys import FOREIGN_KEYS
from megatron_fp8.config.problem import ConfigError, Problem
from megatron_fp8.config.schema import Config
from megatron_fp8.config.source import Source, Written, read_files, read_overrides

DEFAULT = "default"
FROM_ACCELERATE = "precision.from_accelerate"
# In a shorter word one other letter makes another word.
_SHORTEST_WORD = 4


@dataclass(frozen=True)
class LoadedConfig:
    """A config and each dotted key's origin: `file:line`, "command line" or "default".

    `overridden`: what an Accelerate YAML says of keys that the config gives another value, as written there.
    """

    config: Config
    origins: Mapping[str, str]
    overridden: Mapping[str, Written] = field(default_factory=dict)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The config of the YAML file at `path`, its bases and `section.key=value` overrides, later over earlier.

    Raises ConfigError with every mistake: unreadable files, wrong YAML, unknown or missing keys, wrong types,
    values outside a key's range.
    """
    source = read_files(path)
    given = read_overrides(list(overrides))
    source.values.update(given.values)
    mistakes, overridden = _take_accelerate(source)
    problems = [*source.problems, *given.problems, *mistakes]
    fields = config_fields()
    values: dict[str, dict[str, Any]] = {section: {} for section in Config.model_fields}
    wrong: set[str] = set()
    for key, written in source.values.items():
        spec = fields.get(key)
        if spec is None:
            problems.extend(_unknown_key(key, written))
            continue
        try:
            values[spec.section][spec.name] = to_value(written.node, spec)
        except ValueMismatchError as error:
            wrong.add(key)
            problems.append(_wrong_value(spec, written, str(error)))
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems.extend(_schema_problems(error, source, wrong, path))
    if problems:
        raise ConfigError.from_problems(problems)
    origins = {key: source.values[key].origin if key in source.values else DEFAULT for key in fields}
    overridden = {key: written for key, written in overridden.items() if _differs(config, fields[key], written)}
    return LoadedConfig(config, types.MappingProxyType(origins), types.MappingProxyType(overridden))


def _differs(config: Config, spec: FieldSpec, written: Written) -> bool:
    """Whether a key has another value than the one that is written there."""
    try:
        return bool(to_value(written.node, spec) != getattr(getattr(config, spec.section), spec.name))
    except ValueMismatchError:
        return True


def _take_accelerate(source: Source) -> tuple[list[Problem], dict[str, Written]]:
    """Put what an Accelerate YAML says below the values of `source`, and take its path away.

    Its mistakes, and what it says of keys that `source` has, defaults of Accelerate aside.
    """
    written = source.values.get(FROM_ACCELERATE)
    if written is None or not isinstance(written.node, yaml.ScalarNode) or written.text.lower() in ("", "~", "null"):
        return [], {}
    path = written.node.value
    accelerate = read_accelerate(path, written.origin)
    overridden = {
        key: written
        for key, written in accelerate.values.items()
        if key in source.values and not written.origin.endswith(DEFAULT)
    }
    source.values = {**accelerate.values, **source.values}
    # What the file says stands in the other keys now, and a config that is written down needs it no more.
    source.values[FROM_ACCELERATE] = Written(yaml.ScalarNode("tag:yaml.org,2002:null", ""), "", f"{path} was read")
    return accelerate.problems, overridden


def process_environment() -> Mapping[str, str]:
    """The process's environment variables, for those that take them as an argument."""
    return types.MappingProxyType(dict(os.environ))


def _unknown_key(key: str, written: Written) -> Iterator[Problem]:
    """The report of a key that the schema does not have; none for a section that is there but empty."""
    section, dot, _ = key.partition(".")
    if not dot and section in Config.model_fields:
        if written.text.lower() in ("", "~", "null", "{}"):
            return
        reason = "a section holds key: value lines"
        use = f"keys of {section} on indented lines below it"
    elif dot and section not in Config.model_fields:
        reason = f"unknown section {section}"
        use = _nearest(key) or f"one of the sections {', '.join(Config.model_fields)}"
    elif dot:
        reason = f"unknown key in section {section}"
        use = _nearest(key) or "--help lists the keys"
    else:
        reason = "unknown section"
        use = _nearest(key) or f"one of the sections {', '.join(Config.model_fields)}"
    yield Problem(key, written.text, reason, use, written.origin)


def _nearest(key: str) -> str | None:
    """The known key that `key` was most likely meant to be, or None.

    The name in another section, another program's name, or a slip of the pen. Names that are only alike mislead:
    `max_lr` is not `min_lr`.
    """
    known = config_fields()
    key = key.strip("-").replace("-", "_").lower()
    section, dot, name = key.rpartition(".")
    section = section.rpartition(".")[2] if dot else name
    elsewhere = [other for other, spec in known.items() if spec.name == name]
    if elsewhere:
        return elsewhere[0]
    if name in FOREIGN_KEYS:
        return FOREIGN_KEYS[name]
    sections = difflib.get_close_matches(section, list(Config.model_fields), n=1, cutoff=0.7)
    if sections and not dot:
        return f"section {sections[0]}"
    same_section = {spec.name: other for other, spec in known.items() if spec.section == section}
    all_names = {spec.name: other for other, spec in known.items()}
    for names in (same_section, all_names):
        near = [other for other in names if _is_slip(name, other)]
        if near:
            return names[difflib.get_close_matches(name, near, n=1, cutoff=0.0)[0]]
    return None


def _is_slip(written: str, meant: str) -> bool:
    """Whether a name is another but for its underscores, two letters exchanged, or one too many, missing or wrong.

    In each word of it: words that are whole and other words are no slip.
    """
    if written.replace("_", "") == meant.replace("_", ""):
        return True
    words, others = written.split("_"), meant.split("_")
    differing = [pair for pair in zip(words, others, strict=False) if pair[0] != pair[1]]
    return len(words) == len(others) and len(differing) == 1 and _is_misspelt(*differing[0])


def _is_misspelt(word: str, meant: str) -> bool:
    """Whether a word of some length became another by one slip; `s` at the end is one in any word."""
    if word.rstrip("s") == meant.rstrip("s"):
        return True
    start = _num_common(word, meant)
    end = _num_common(word[start:][::-1], meant[start:][::-1])
    rest, other = word[start : len(word) - end], meant[start : len(meant) - end]
    is_one = (len(rest), len(other)) in ((1, 1), (0, 1), (1, 0)) or (len(rest) == 2 and rest == other[::-1])
    # Another number is another thing.
    return is_one and (rest + other).isalpha() and max(len(word), len(meant)) >= _SHORTEST_WORD


def _num_common(text: str, other: str) -> int:
    """Letters that both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))


def _wrong_value(spec: FieldSpec, written: Written, reason: str) -> Problem:
    use = spec.description
    if spec.kind == "choice" and isinstance(written.node, yaml.ScalarNode):
        choices = [str(choice) for choice in spec.choices]
        near = difflib.get_close_matches(written.node.value.lower(), choices, n=1, cutoff=0.7)
        use = near[0] if near else use
    return Problem(spec.key, written.text, reason, use, written.origin)


def _schema_problems(error: ValidationError, source: Source, wrong: set[str], path: str | Path) -> Iterator[Problem]:
    """The schema's own complaints: missing keys, and values outside their range."""
    fields = config_fields()
    for detail in error.errors(include_url=False, include_context=False):
        key = ".".join(str(part) for part in detail["loc"][:2])
        spec = fields[key]
        if key in source.values and key not in wrong:
            written = source.values[key]
            is_number = isinstance(detail["input"], int | float) and math.isfinite(detail["input"])
            reason = (spec.beyond(detail["input"]) if is_number else None) or f"not {spec.description}"
            yield Problem(key, written.text, reason, spec.description, written.origin)
        elif key not in source.values and not source.unreadable:
            reason = f"missing required key: {spec.doc}"
            yield Problem(key, "(not set)", reason, f"{key}: {spec.description}", str(path))


_LINE_WIDTH_CHARS = 100


def dump_config(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """`config` as YAML with every key, its documentation above it and, with `origins`, its value's origin.

    `load_config` and any YAML 1.1 reader read an equal config back from it.
    """
    lines: list[str] = []
    section = ""
    for key, spec in config_fields().items():
        if spec.section != section:
            section = spec.section
            lines += ["", f"# {section_doc(section)}", f"{section}:"] if lines else [f"{section}:"]
        lines += textwrap.wrap(
            spec.doc,
            _LINE_WIDTH_CHARS,
            initial_indent="  # ",
            subsequent_indent="  # ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        value = getattr(getattr(config, section), spec.name)
        origin = f"  # {' '.join(origins[key].split())}" if origins else ""
        lines.append(f"  {spec.name}: {_to_yaml(value)}{origin}")
    return "\n".join(lines) + "\n"


def _to_yaml(value: Any) -> str:
    """`value` on one line; YAML 1.1's own forms, so that `off` is quoted and 1e-5 is written 1.0e-05."""
    if isinstance(value, str) and value.lower() == "none":
        # A text to YAML, and null to us where it stands without quotes.
        return f"'{value}'"
    # PyYAML writes Unicode's line separators in a way that it reads back as spaces: escaped they survive.
    readable = all(str(item).isprintable() for item in (value if isinstance(value, list) else [value]))
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=readable)
    return text.removesuffix("\n").removesuffix("\n...")
