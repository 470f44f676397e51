"""The schema as a flat table: one row per dotted key, with its kind, range, default and text.

Reading, writing and the help of the command line all go through this table, so none of them can miss a key.
Knows nothing of where values come from. Imports no torch.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from megatron_fp8.config.limits import Place, RealLimit, WholeLimit
from megatron_fp8.config.schema import Config

Kind = Literal["int", "float", "bool", "str", "choice", "strings", "ints", "floats", "bools"]

_KIND_OF_TYPE: dict[Any, Kind] = {int: "int", float: "float", bool: "bool", str: "str"}
_KIND_OF_ITEMS: dict[Any, Kind] = {str: "strings", int: "ints", float: "floats", bool: "bools"}
_TEXT_OF_KIND = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "strings": "a list of strings",
    "ints": "a list of integers",
    "floats": "a list of numbers",
    "bools": "a list of booleans (true or false)",
}
_WITHIN = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
_TEXT_OF_BOUND = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}


@dataclass(frozen=True)
class FieldSpec:
    """One config key; `choices` are those of `kind` "choice", `bounds` are pydantic's ge, gt, le, lt.

    `length`: how many items a list must have; None: any number. `place`: what the path or paths it names are for.
    """

    key: str
    kind: Kind
    optional: bool
    choices: tuple[Any, ...]
    bounds: tuple[tuple[str, float], ...]
    pattern: str | None
    length: int | None
    required: bool
    default: Any
    doc: str
    place: Place | None = None

    @property
    def section(self) -> str:
        """The part of the key before the dot."""
        return self.key.partition(".")[0]

    @property
    def name(self) -> str:
        """The part of the key after the dot."""
        return self.key.partition(".")[2]

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type is within the key's choices and range; null where that is allowed."""
        if value is None:
            return self.optional
        if self.choices:
            return value in self.choices
        if self.length is not None:
            return len(value) == self.length
        return all(_WITHIN[name](value, limit) for name, limit in self.bounds)

    def beyond(self, value: Any) -> str | None:
        """Which bound a number of the right type is beyond, and why that is one; None: it is within all."""
        for name, limit in self.bounds:
            if not _WITHIN[name](value, limit):
                return f"not {_show_bound(name, limit)}{f': {limit.why}' if _has_why(limit) else ''}"
        return None

    @property
    def reasons(self) -> str:
        """Why the bounds are where they are, in sentences; empty where that goes without saying."""
        reasons = [
            f"{_show_bound(name, limit).capitalize()}: {limit.why}." for name, limit in self.bounds if _has_why(limit)
        ]
        return " ".join(reasons)

    @property
    def description(self) -> str:
        """What a value must be, in words: "a whole number, at least 1, or null"."""
        if self.kind == "choice":
            text = " or ".join(str(choice) for choice in self.choices)
        else:
            text = _TEXT_OF_KIND[self.kind]
        limits = [_show_bound(name, limit) for name, limit in self.bounds]
        if limits:
            text += f", {' and '.join(limits)}"
        if self.length is not None:
            text += f" of length {self.length}"
        if self.pattern:
            text += f", matching {self.pattern}"
        return f"{text}, or null" if self.optional else text


def _show_bound(name: str, limit: float) -> str:
    return f"{_TEXT_OF_BOUND[name]} {f'{limit:,}' if isinstance(limit, int) else f'{limit:.8g}'}"


def _has_why(limit: float) -> TypeGuard[WholeLimit | RealLimit]:
    return isinstance(limit, (WholeLimit, RealLimit))


@functools.cache
def config_fields() -> Mapping[str, FieldSpec]:
    """Every key of the schema by its dotted name, in the schema's order."""
    specs = {}
    for section, section_field in Config.model_fields.items():
        section_class = section_field.annotation
        assert section_class is not None
        for name, field in section_class.model_fields.items():
            key = f"{section}.{name}"
            specs[key] = _field_spec(key, field)
    return types.MappingProxyType(specs)


def section_doc(section: str) -> str:
    """The first line of a section's docstring."""
    section_class = Config.model_fields[section].annotation
    return (section_class.__doc__ or "").strip().partition("\n")[0]


def _field_spec(key: str, field: FieldInfo) -> FieldSpec:
    kind, optional, choices = _kind_of(key, field.annotation)
    bounds = tuple(
        (name, limit)
        for constraint in field.metadata
        for name in _TEXT_OF_BOUND
        if (limit := getattr(constraint, name, None)) is not None
    )
    patterns = [pattern for item in field.metadata if (pattern := getattr(item, "pattern", None))]
    return FieldSpec(
        key=key,
        kind=kind,
        optional=optional,
        choices=choices,
        bounds=bounds,
        pattern=patterns[0] if patterns else None,
        length=next((length for item in field.metadata if (length := getattr(item, "max_length", None))), None),
        required=field.is_required(),
        default=None if field.is_required() else field.get_default(call_default_factory=True),
        doc=" ".join((field.description or "").split()),
        place=next((item for item in field.metadata if isinstance(item, Place)), None),
    )


def _kind_of(key: str, annotation: Any) -> tuple[Kind, bool, tuple[Any, ...]]:
    """(kind, whether null is allowed, choices) of a field's annotation.

    Raises TypeError for a form of annotation that reading does not know yet, so that a new one in the schema
    is noticed when the program starts.
    """
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        inner = [option for option in get_args(annotation) if option is not type(None)]
        if len(inner) == 1:
            kind, _, choices = _kind_of(key, inner[0])
            return kind, True, choices
    if origin is Literal:
        return "choice", False, get_args(annotation)
    if origin is list and get_args(annotation)[0] in _KIND_OF_ITEMS:
        return _KIND_OF_ITEMS[get_args(annotation)[0]], False, ()
    if annotation in _KIND_OF_TYPE:
        return _KIND_OF_TYPE[annotation], False, ()
    raise TypeError(f"config key {key} has the type {annotation}, which config/fields.py cannot read")


_TRUE = frozenset({"true", "yes", "on"})
_FALSE = frozenset({"false", "no", "off"})
_NULL = frozenset({"", "~", "null", "none"})
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_LARGEST_INTEGER = 2**63 - 1
_MAX_DIGITS = 100
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
        raise ValueMismatchError("null is not allowed")
    if spec.kind in _ITEM_READERS:
        return [_ITEM_READERS[spec.kind](text, spec) for text in _to_strings(node)]
    if not isinstance(node, yaml.ScalarNode):
        form = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
        raise ValueMismatchError(f"a single value is required, not {form}")
    return _SCALAR_READERS[spec.kind](node.value, spec)


def _is_null(text: str, spec: FieldSpec) -> bool:
    # `none` is a value of its own where the key's choices have it.
    return text.lower() in _NULL and text.lower() not in spec.choices


def _to_strings(node: yaml.Node) -> list[str]:
    """A list of texts; a single text stands for a list of one."""
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    for position, item in enumerate(nodes):
        if not isinstance(item, yaml.ScalarNode):
            raise ValueMismatchError(f"item {position + 1} is not a string")
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
        if _INTEGER.fullmatch(text) and len(text) < _MAX_DIGITS:
            number = int(text)
        else:
            approximation = float(text)
            if not math.isfinite(approximation) or approximation != int(approximation):
                raise ValueMismatchError("not an integer")
            number = int(approximation)
    except ValueError as error:
        raise ValueMismatchError("not an integer") from error
    if abs(number) > _LARGEST_INTEGER:
        raise ValueMismatchError("too large: it does not fit in 64 bits")
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


_ITEM_READERS = {"strings": _to_text, "ints": _to_integer, "floats": _to_float, "bools": _to_bool}
_SCALAR_READERS = {
    "str": _to_text,
    "int": _to_integer,
    "float": _to_float,
    "bool": _to_bool,
    "choice": _to_choice,
}
