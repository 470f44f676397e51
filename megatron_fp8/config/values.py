"""Owns turning what a person wrote into a value of the type the schema asks for.

The type decides how the text is read, not YAML 1.1's guess: there `1e-4` is a text, `off` is false, `0.3` a
number and `2026-01-01` a date, although a learning rate, an `amax_reduction: off`, a blend's weight in a list
of texts and a run's name are meant. Ranges are checked by the schema itself. Imports no torch.
"""

from __future__ import annotations

import math
import re
from typing import Any

import yaml

from megatron_fp8.config.fields import FieldSpec

_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})
_NULL = frozenset({"", "~", "null", "none"})
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_LARGEST_INTEGER = 2**63 - 1
_MOST_DIGITS = 100
_YAML_TAGS = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp", "seq", "map")
) | {"tag:yaml.org,2002:value", "tag:yaml.org,2002:merge"}


class ValueMismatchError(Exception):
    """The text does not have the type that the key needs; the message says why."""


def to_value(node: yaml.Node, spec: FieldSpec) -> Any:
    """The value of `node` as `spec`'s kind. Raises ValueMismatchError."""
    if node.tag not in _YAML_TAGS:
        raise ValueMismatchError(f"the YAML tag {node.tag} is not allowed")
    if isinstance(node, yaml.ScalarNode) and node.style is None and _is_null(node.value, spec):
        if spec.optional:
            return None
        raise ValueMismatchError("a value is needed, null is not one")
    if spec.kind in _ITEM_READERS:
        return [_ITEM_READERS[spec.kind](text, spec) for text in _to_strings(node)]
    if not isinstance(node, yaml.ScalarNode):
        form = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
        raise ValueMismatchError(f"one value is needed, not {form}")
    return _SCALAR_READERS[spec.kind](node.value, spec)


def _is_null(text: str, spec: FieldSpec) -> bool:
    # `none` is a value of its own where the key's choices have it.
    return text.lower() in _NULL and text.lower() not in spec.choices


def _to_strings(node: yaml.Node) -> list[str]:
    """A list of texts; a single text stands for a list of one."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    for position, item in enumerate(nodes):
        if not isinstance(item, yaml.ScalarNode):
            raise ValueMismatchError(f"item {position + 1} is not a text")
        if item.tag not in _YAML_TAGS:
            raise ValueMismatchError(f"the YAML tag {item.tag} is not allowed")
        if not item.value:
            raise ValueMismatchError(f"item {position + 1} is empty")
    return [item.value for item in nodes]


def _to_text(text: str, _: FieldSpec) -> str:
    return text


def _to_integer(text: str, _: FieldSpec) -> int:
    """`text` as an integer; `1_000` and `1e6` are integers too, `4.5` and `true` are not."""
    try:
        if _INTEGER.fullmatch(text) and len(text) < _MOST_DIGITS:
            number = int(text)
        else:
            approximation = float(text)
            if not math.isfinite(approximation) or approximation != int(approximation):
                raise ValueMismatchError("not a whole number")
            number = int(approximation)
    except ValueError as error:
        raise ValueMismatchError("not a whole number") from error
    if abs(number) > _LARGEST_INTEGER:
        raise ValueMismatchError("too large: it does not fit into 64 bits")
    return number


def _to_float(text: str, _: FieldSpec) -> float:
    """`text` as a number, in YAML's and Python's forms: `1e-4`, `.5`, `3`, `.inf`."""
    try:
        return float(re.sub(r"^([-+]?)\.(inf|nan)$", r"\1\2", text, flags=re.IGNORECASE))
    except ValueError as error:
        raise ValueMismatchError("not a number") from error


def _to_bool(text: str, _: FieldSpec) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueMismatchError("neither true nor false")


def _to_choice(text: str, spec: FieldSpec) -> Any:
    """The choice written as `text`, upper and lower case alike."""
    for choice in spec.choices:
        if text.lower() == str(choice).lower():
            return choice
    raise ValueMismatchError(f"not one of {', '.join(str(choice) for choice in spec.choices)}")


_ITEM_READERS = {"strings": _to_text, "ints": _to_integer, "bools": _to_bool}
_SCALAR_READERS = {
    "str": _to_text,
    "int": _to_integer,
    "float": _to_float,
    "bool": _to_bool,
    "choice": _to_choice,
}
