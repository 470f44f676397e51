"""Owns the list of warnings of the libraries underneath that say nothing to a user of this program.

Each has its reason. Every other warning is shown. Imports no torch.
"""

import warnings

# Beginning of the message (a regular expression), and why it says nothing.
_SAYS_NOTHING = {
    # Megatron Core looks for Apex's norms; ours are Transformer Engine's.
    "Apex is not installed": UserWarning,
    # Said of a default of Megatron Core's own; CUDA graphs are not used.
    "full scope is deprecated": UserWarning,
    # Megatron Core 0.19 imports a model of several modalities to build any optimizer.
    "MimoModelConfig is experimental": UserWarning,
    # Transformer Engine's key/value cache calls it.
    r"torch\.range is deprecated": UserWarning,
    # Megatron Core calls torch by these names.
    r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated": FutureWarning,
    "`load_state_dict` is deprecated": FutureWarning,
}
# Of the order of kernels on a GPU.
_SAYS_NOTHING_WHEN_EMULATED = {"To guarantee overlapping TP and SP collectives": UserWarning}


def hide_meaningless_warnings(emulated: bool) -> None:
    """Filter them out in this process; `emulated`: it computes on the CPU stand-in."""
    messages = _SAYS_NOTHING | (_SAYS_NOTHING_WHEN_EMULATED if emulated else {})
    for message, category in messages.items():
        warnings.filterwarnings("ignore", message=message, category=category)
