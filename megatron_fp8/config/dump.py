"""Owns writing a config as YAML that reads back equal, with each key's meaning. Imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import yaml

from megatron_fp8.config.fields import config_fields, section_doc
from megatron_fp8.config.schema import Config

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
