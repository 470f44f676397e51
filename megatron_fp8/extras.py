"""Names the extra of this package that installs a missing optional dependency."""

from __future__ import annotations

# Modules by the extra of pyproject.toml that installs them; a test compares the two.
MODULES = {
    "train": ("megatron", "pynvml", "rich", "tensorboard", "wandb"),
    "data": ("google", "pyarrow", "regex", "sentencepiece", "tiktoken", "tokenizers", "zstandard"),
    "report": ("jinja2", "plotly"),
    "hf": ("safetensors",),
}


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What to install if the missing module is an optional dependency; None for any other module."""
    name = (error.name or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if name in modules:
            return f"{error.name} is not installed\n    use: pip install 'megatron-fp8[{extra}]'"
    return None
