"""Owns what every config section has in common: frozen, no unknown keys, fields documented in place.

Imports no torch.
"""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of config keys; unknown keys, infinities and NaN are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        strict=False,
        protected_namespaces=(),
        allow_inf_nan=False,
    )
