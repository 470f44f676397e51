"""Reads config text: YAML files with their chain of bases, and `section.key=value` overrides.

Every value stays a YAML node with its text and origin; what type it should have is not known here
(`config/fields.py`), nor which keys exist (`config/load.py`). Nodes are never turned into objects by their
tags, so no file can run code. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from megatron_fp8.config.paths import is_missing, why_refused, why_unreadable
from megatron_fp8.config.problem import Problem

COMMAND_LINE = "command line"
_NULL_TAG = "tag:yaml.org,2002:null"


@dataclass(frozen=True)
class Written:
    """A value as a person wrote it: its YAML node, its text, and where it is written."""

    node: yaml.Node
    text: str
    origin: str


@dataclass
class Source:
    """What was found: values by dotted key (later ones replace earlier ones) and the mistakes met.

    `unreadable` is set when some text could not be read at all, so that keys may be missing for that reason.
    """

    values: dict[str, Written] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unreadable: bool = False


@dataclass(frozen=True)
class _File:
    """One file's own values, without its base's; `base` is the text of its `base:` key."""

    source: Source
    base: Written | None


def read_files(path: str | Path, base_key: str | None = "base") -> Source:
    """The values of the file at `path` over those of its chain of bases.

    A `base:` is a path relative to the file that names it; `base_key` None: files of this kind have none. Mistakes
    are collected, none is raised.
    """
    files: list[_File] = []
    names: list[str] = []
    problems: list[Problem] = []
    name, origin = os.path.normpath(path), COMMAND_LINE
    unreadable = False
    while True:
        text, reason = _read_text(name)
        if text is None:
            key = "base" if names else "CONFIG"
            use = "the path of a config file" + (f", relative to {names[-1]}" if names else "")
            problems.append(Problem(key, name, reason, use, origin))
            unreadable = True
            break
        names.append(name)
        files.append(_interpret(text, name, base_key))
        base = files[-1].base
        if base is None:
            break
        name, origin = os.path.normpath(Path(name).parent / base.text), base.origin
        chain = [_real(earlier) for earlier in names]
        if _real(name) in chain:
            cycle = " -> ".join([*names[chain.index(_real(name)) :], name])
            problems.append(
                Problem(
                    "base", base.text, f"circular `base:` chain: {cycle}", "remove one of these `base:` keys", origin
                )
            )
            break
    merged = Source(problems=problems, unreadable=unreadable)
    for file in reversed(files):
        merged.values.update(file.source.values)
        merged.problems.extend(file.source.problems)
        merged.unreadable |= file.source.unreadable
    return merged


def read_overrides(overrides: list[str]) -> Source:
    """The values of `section.key=value` texts; of two for the same key the last one counts."""
    source = Source()
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or "." not in key:
            source.problems.append(
                Problem("override", override, "not section.key=value", _override_hint(key), COMMAND_LINE)
            )
            continue
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except (yaml.YAMLError, RecursionError) as error:
            source.problems.append(
                Problem(key, text, f"not valid YAML: {_describe(error)}", f"{key}='...' in quotes", COMMAND_LINE)
            )
            continue
        if node is None:
            node = yaml.ScalarNode(_NULL_TAG, "")
        source.values[key] = Written(node, text.strip(), COMMAND_LINE)
    return source


def _override_hint(key: str) -> str:
    return f"{key or 'section.key'}=VALUE" if "." in key else "section.key=VALUE, as in training.seed=1"


def _real(name: str) -> str:
    # A NUL leads nowhere, which reading will say.
    return name if "\0" in name else os.path.realpath(name)


def _read_text(name: str) -> tuple[str | None, str]:
    """(the file's text, "") or (None, why it cannot be read)."""
    try:
        if not is_missing(name) and (reason := why_unreadable(name)):
            return None, reason
        return Path(name).read_text(encoding="utf-8"), ""
    except FileNotFoundError:
        return None, "no such file"
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
    except (OSError, ValueError) as error:
        return None, why_refused(name, error)


def _interpret(text: str, name: str, base_key: str | None) -> _File:
    """The values of one file's text, by dotted key."""
    source = Source()
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        origin = f"{name}:{mark.line + 1}" if mark else name
        lines = text.splitlines()
        shown = lines[mark.line].strip() if mark and mark.line < len(lines) else ""
        source.problems.append(Problem("(YAML)", shown, f"not valid YAML: {_describe(error)}", "valid YAML", origin))
        source.unreadable = True
        return _File(source, None)
    if root is None:
        return _File(source, None)
    if not isinstance(root, yaml.MappingNode):
        source.problems.append(
            Problem(
                "(file)",
                text,
                "a config must be a mapping of sections",
                "section: followed by indented key: value lines",
                name,
            )
        )
        return _File(source, None)
    base = None
    for key, node, origin in _pairs(root, "", name, source.problems):
        written = Written(node, _text_of(node, text), origin)
        if key == base_key:
            base = _base(written, source)
        elif isinstance(node, yaml.MappingNode) and node.value:
            for inner_key, inner, inner_origin in _pairs(node, f"{key}.", name, source.problems):
                source.values[inner_key] = Written(inner, _text_of(inner, text), inner_origin)
        else:
            source.values[key] = written
    return _File(source, base)


def _base(written: Written, source: Source) -> Written | None:
    node = written.node
    if isinstance(node, yaml.ScalarNode) and node.value:
        return Written(node, node.value, written.origin)
    source.problems.append(
        Problem("base", written.text, "base must be the path of a single file", "base: other.yaml", written.origin)
    )
    source.unreadable = True
    return None


def _pairs(
    mapping: yaml.MappingNode, prefix: str, name: str, problems: list[Problem]
) -> Iterator[tuple[str, yaml.Node, str]]:
    """(prefixed key, value, origin) of a mapping's entries; of a key that stands twice the first counts."""
    lines: dict[str, int] = {}
    for key_node, node in mapping.value:
        line = key_node.start_mark.line + 1
        origin = f"{name}:{line}"
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(
                Problem(f"{prefix}?", key_node.tag, "a key must be plain text", "section.key names", origin)
            )
            continue
        key = f"{prefix}{key_node.value}"
        if key in lines:
            problems.append(
                Problem(
                    key,
                    node.value if isinstance(node, yaml.ScalarNode) else "...",
                    f"duplicate key, first defined on line {lines[key]}",
                    "remove one of the two",
                    origin,
                )
            )
            continue
        lines[key] = line
        yield key, node, origin


def _text_of(node: yaml.Node, text: str) -> str:
    return text[node.start_mark.index : node.end_mark.index].strip()


def _describe(error: Exception) -> str:
    """A parser's complaint in one line, without its multi-line excerpt."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, yaml.MarkedYAMLError):
        parts = [error.context, error.problem]
        return ", ".join(part for part in parts if part) or "syntax error"
    if isinstance(error, yaml.reader.ReaderError):
        return f"character {error.character!r} at position {error.position} is not allowed"
    return str(error)
