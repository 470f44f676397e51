"""Hides warnings of the libraries underneath that mean nothing to users; all others are shown. Imports no torch."""

import warnings

# Regular expressions of how messages begin, with the reason to hide each.
_MEANINGLESS = {
    # Megatron Core looks for Apex's norms; this package uses Transformer Engine's.
    "Apex is not installed": UserWarning,
    # About a default of Megatron Core; CUDA graphs are not used.
    "full scope is deprecated": UserWarning,
    # Megatron Core 0.19 imports a multimodal model to build any optimizer.
    "MimoModelConfig is experimental": UserWarning,
    # Transformer Engine's key/value cache calls it.
    r"torch\.range is deprecated": UserWarning,
    # Megatron Core calls torch by these names.
    r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated": FutureWarning,
    "`load_state_dict` is deprecated": FutureWarning,
}
# About the order of kernels on a GPU.
_MEANINGLESS_WHEN_EMULATED = {"To guarantee overlapping TP and SP collectives": UserWarning}


def hide_meaningless_warnings(emulated: bool) -> None:
    """Filter them out in this process; `emulated`: on the CPU stand-in."""
    messages = _MEANINGLESS | (_MEANINGLESS_WHEN_EMULATED if emulated else {})
    for message, category in messages.items():
        warnings.filterwarnings("ignore", message=message, category=category)
