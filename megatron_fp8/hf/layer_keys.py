"""What a `config.json` says of single layers: sliding windows, and layers without RoPE. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fp8.config.layer_kinds import has_rope, window_of
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.hf.mapping import HFSettings

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class WindowOfAll:
    """One window for all layers. Theirs counts the token itself, ours the ones before it."""

    default: int | None = None

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        return {"window_size": _ours(_sliding_window(settings, self.default))}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        return {"sliding_window": _theirs(model)}


@dataclass(frozen=True)
class WindowByLayer:
    """A window in the layers that `layer_types` names, or a rule for it where the file has no list.

    `rule`: whether a layer has the window; it reads the keys of the rule. `switch`: a key that must be true for any.
    """

    rule: Callable[[HFSettings, int], bool]
    default: int | None = 4096
    switch: str = ""

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        num_layers = settings.size("num_hidden_layers")
        window = _sliding_window(settings, self.default)
        by_rule = [self.rule(settings, layer) for layer in range(num_layers)]
        if self.switch and not settings.flag(self.switch, False):
            window, by_rule = None, [False] * num_layers
        types = settings.get("layer_types")
        if types is None:
            types = [_SLIDING if by_rule[layer] and window else _FULL for layer in range(num_layers)]
        wrong = (
            not isinstance(types, list) or len(types) != num_layers or any(x not in (_FULL, _SLIDING) for x in types)
        )
        if wrong or (window is None and _SLIDING in types):
            reason = f"num_hidden_layers={num_layers} entries must be {_FULL} or, with sliding_window, {_SLIDING}"
            settings.reject("layer_types", types, reason, "the config.json that belongs to the weights")
            return {}
        return {"window_size": _ours(window), **pattern([kind == _SLIDING for kind in types])} if window else {}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        windows = [window_of(model, layer) is not None for layer in range(model.num_layers)]
        theirs = {"layer_types": [_SLIDING if window else _FULL for window in windows]}
        window = _theirs(model)
        if window is None and not self.switch:
            # Gemma's class makes the mask of the windows, whether a layer has one or not.
            window = self.default
        return theirs | {"sliding_window": window} | ({self.switch: any(windows)} if self.switch else {})


@dataclass(frozen=True)
class NoRope:
    """Layers without RoPE, in SmolLM 3's keys: a list in which 0 is such a layer, or every N-th."""

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        num_layers = settings.size("num_hidden_layers")
        marks = settings.get("no_rope_layers")
        if marks is not None and (not isinstance(marks, list) or len(marks) < num_layers):
            reason, use = f"needs num_hidden_layers={num_layers} entries", "the config.json that belongs to the weights"
            settings.reject("no_rope_layers", marks, reason, use)
            return {}
        without = [lacks_rope(settings, layer) for layer in range(num_layers)]
        return {"no_rope_freq": _frequency(without, marks=True)}

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        return {"no_rope_layers": [int(has_rope(model, layer)) for layer in range(model.num_layers)]}


def lacks_rope(settings: HFSettings, layer: int) -> bool:
    """Whether a layer of SmolLM 3 has no RoPE."""
    interval, marks = settings.size("no_rope_layer_interval", 4), settings.get("no_rope_layers")
    if not isinstance(marks, list) or layer >= len(marks):
        return (layer + 1) % interval == 0
    return not marks[layer]


def pattern(has_window: Sequence[bool]) -> dict[str, list[int] | None]:
    """`window_attn_skip_freq` for whether each layer has the window."""
    return {"window_attn_skip_freq": _frequency([not value for value in has_window], marks=False)}


def _frequency(chosen: Sequence[bool], marks: bool) -> list[int] | None:
    """None for no layer, `[N]` for every N-th, else a list in which `marks` stands for a chosen layer."""
    if not any(chosen):
        return None
    first = list(chosen).index(True) + 1
    if all(value == ((layer + 1) % first == 0) for layer, value in enumerate(chosen)):
        return [first]
    return [int(value == marks) for value in chosen]


def _sliding_window(settings: HFSettings, default: int | None) -> int | None:
    """The window that the file gives; a null is none, and only a missing key is the default."""
    value = settings.unless_missing("sliding_window", default)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        settings.reject("sliding_window", value, "it must be a positive integer or null", "null for no window")
        return None
    return value


def _ours(window: int | None) -> list[int] | None:
    return None if window is None else [window - 1, 0]


def _theirs(model: ModelConfig) -> int | None:
    return None if model.window_size is None else model.window_size[0] + 1
