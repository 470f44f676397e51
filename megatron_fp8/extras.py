"""Names the optional dependencies: which extra of this package installs a module that is missing."""

from __future__ import annotations

# Modules by the extra of pyproject.toml that installs them; a test compares the two.
_MODULES = {
    "train": ("megatron", "onnxscript", "pynvml", "rich", "tensorboard", "wandb"),
    "data": ("google", "pyarrow", "regex", "sentencepiece", "tiktoken", "tokenizers", "zstandard"),
    "report": ("jinja2", "plotly"),
    "hf": ("safetensors",),
}


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What to install where an optional dependency is not there; None for any other module."""
    name = (error.name or "").partition(".")[0]
    for extra, modules in _MODULES.items():
        if name in modules:
            return f"{error.name} is not installed\n    use: pip install megatron-fp8[{extra}]"
    return None
