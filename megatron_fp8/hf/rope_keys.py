"""RoPE in a `config.json`: `rope_parameters` since version 5 of `transformers`, before it `rope_scaling`.

Where a file has both, `rope_scaling` counts and the other one is not read, as in `transformers`.
Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_fp8.config.layer_kinds import original_length
from megatron_fp8.config.schema import ModelConfig
from megatron_fp8.hf.mapping import HFSettings

_BEFORE, _NOW = "rope_scaling", "rope_parameters"
_ORIGINAL = "original_max_position_embeddings"
# Kind -> its keys in theirs and ours, as far as they are one to one.
_KEYS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "rope_scaling_factor"},
    "dynamic": {"factor": "rope_scaling_factor"},
    "llama3": {
        "factor": "rope_scaling_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        _ORIGINAL: _ORIGINAL,
    },
    "yarn": {
        "factor": "rope_scaling_factor",
        "attention_factor": "rope_attention_factor",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "truncate": "rope_truncate",
        _ORIGINAL: _ORIGINAL,
    },
    "longrope": {
        "factor": "rope_scaling_factor",
        "attention_factor": "rope_attention_factor",
        "short_factor": "rope_short_factor",
        "long_factor": "rope_long_factor",
        _ORIGINAL: _ORIGINAL,
    },
}
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
}
_MSCALES = ("mscale", "mscale_all_dim")


@dataclass(frozen=True)
class Rope:
    """RoPE of all layers. `base`, `share`: defaults of its base and of the share of a head that is rotated.

    `partial`: the class can rotate a share; the others take no notice of the key. `base_key`, `share_key`: where older
    files have them. `outer_original`: the original length is a key of its own (Phi 3). `interleaved`: neighboring
    features are rotated.
    """

    base: float = 10000.0
    share: float = 1.0
    partial: bool = False
    base_key: str = "rope_theta"
    share_key: str = "partial_rotary_factor"
    outer_original: bool = False
    interleaved: bool = False

    def read(self, settings: HFSettings) -> Mapping[str, Any]:
        before, now = settings.mapping(_BEFORE), settings.mapping(_NOW)
        where, rope = (_BEFORE, before) if before else (_NOW, now)
        base, share = settings.get(self.base_key, self.base), settings.get(self.share_key, self.share)
        if self.outer_original:
            # It comes before the one inside.
            rope[_ORIGINAL] = settings.get(_ORIGINAL, rope.get(_ORIGINAL, 4096))
        ours = {
            "position_embedding_type": "rope",
            "rotary_base": rope.pop("rope_theta", base),
            "rotary_percent": self._share(settings, rope.pop("partial_rotary_factor", share)),
            "rotary_interleaved": self.interleaved,
        }
        return ours | read_scaling(settings, where, rope)

    def _share(self, settings: HFSettings, share: Any) -> Any:
        if not self.partial and share != 1.0:
            reason = "the class rotates whole heads, whatever this says"
            settings.reject(self.share_key, share, reason, f"a model with {self.share_key}=1.0")
        return share

    def write(self, model: ModelConfig) -> Mapping[str, Any]:
        rope = write_scaling(model) | {"rope_theta": model.rotary_base}
        theirs: dict[str, Any] = {self.base_key: model.rotary_base}
        if self.share != 1.0 or model.rotary_percent != 1.0:
            rope["partial_rotary_factor"] = theirs[self.share_key] = model.rotary_percent
        if self.outer_original:
            theirs[_ORIGINAL] = original_length(model)
            rope.pop(_ORIGINAL, None)
        if rope["rope_type"] != "default":
            theirs[_BEFORE] = rope
        return theirs | {_NOW: rope}


def read_scaling(settings: HFSettings, where: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Ours for the rest of theirs, the dictionary of the key `where`, of which nothing may be left over."""
    # `type` is the older name; `su` is that of longrope in Phi 3's first files.
    older = rope.pop("type", "default")
    kind = rope.pop("rope_type", older)
    kind = "longrope" if kind == "su" else kind
    if not isinstance(kind, str) or kind not in _KEYS:
        reason = "this kind of RoPE is not supported"
        settings.reject(f"{where}.rope_type", kind, reason, f"a model with one of {', '.join(_KEYS)}")
        return {}
    mscales = [rope.pop(key, None) for key in _MSCALES] if kind == "yarn" else []
    ours = {"rope_scaling_type": "none" if kind == "default" else kind, **_read_keys(settings, where, kind, rope)}
    longest = settings.count("max_position_embeddings", 0)
    if _ORIGINAL in _KEYS[kind]:
        ours.setdefault(_ORIGINAL, longest)
    if kind == "dynamic":
        ours[_ORIGINAL] = longest or None
    if kind == "yarn":
        ours.setdefault("rope_scaling_factor", longest / ours[_ORIGINAL] if ours[_ORIGINAL] else None)
        if all(mscales) and "rope_attention_factor" not in ours:
            ours["rope_attention_factor"] = _mscale_ratio(ours["rope_scaling_factor"], *mscales)
    for theirs in _REQUIRED[kind]:
        if _KEYS[kind][theirs] not in ours:
            settings.reject(f"{where}.{theirs}", None, f"{kind} RoPE needs it", "the config.json of the model")
    return ours


def _read_keys(settings: HFSettings, where: str, kind: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are one to one; others, and values that are no numbers, are rejected."""
    ours: dict[str, Any] = {}
    for theirs, value in rope.items():
        if value is None or (kind == "default" and theirs in (_ORIGINAL, "factor")):
            continue
        numbers = value if isinstance(value, list) and theirs.endswith(("short_factor", "long_factor")) else [value]
        if theirs not in _KEYS[kind]:
            settings.reject(f"{where}.{theirs}", value, f"{kind} RoPE does not have it", "a model without it")
        elif not all(isinstance(number, (int, float)) for number in numbers):
            reason = "it must be a number, or a list of numbers for longrope's factors"
            settings.reject(f"{where}.{theirs}", value, reason, "the config.json of the model")
        else:
            ours[_KEYS[kind][theirs]] = value
    return ours


def _mscale_ratio(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """DeepSeek's form of YaRN's attention factor, `_compute_yarn_parameters` of `transformers`."""
    if factor <= 1:
        return 1.0
    return (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * mscale_all_dim * math.log(factor) + 1.0)


def write_scaling(model: ModelConfig) -> dict[str, Any]:
    """Theirs for our scaling."""
    kind = "default" if model.rope_scaling_type == "none" else model.rope_scaling_type
    values = {theirs: getattr(model, ours) for theirs, ours in _KEYS[kind].items()}
    return {"rope_type": kind} | {key: value for key, value in values.items() if value is not None}
