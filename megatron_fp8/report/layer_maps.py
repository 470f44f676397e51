"""Owns heat maps over layers: series of single layers put together by what they are of. Imports no torch.

wandb draws a series of histograms as a map of colours, steps across and bins upwards. Here a bin is a layer and its
"count" is the value, so that one picture shows one quantity of one tensor in all layers.
"""

import re
from collections.abc import Mapping

_FP8_OF_A_LAYER = re.compile(r"fp8/layers\.(?P<layer>\d+)/(?P<tensor>.+)/(?P<quantity>amax|scale|clipped|flushed)")
_NORM_OF_A_LAYER = re.compile(r"(?P<quantity>grad-norm|params-norm)/layers\.(?P<layer>\d+)/(?P<tensor>.+)")
_MAPS = (("fp8 map", _FP8_OF_A_LAYER), ("norm map", _NORM_OF_A_LAYER))


def layer_maps(values: Mapping[str, float], num_layers: int) -> dict[str, list[float]]:
    """By `fp8 map/<linear layer>/<operand>/<quantity>` and `norm map/<kind>/<quantity>` the values of layers 0 to
    `num_layers` - 1.

    0 stands for a layer that has no such value (is not in FP8), and for what is not finite.
    """
    maps: dict[str, list[float]] = {}
    for name, value in values.items():
        for prefix, pattern in _MAPS:
            match = pattern.fullmatch(name)
            if match is not None:
                row = maps.setdefault(f"{prefix}/{match['tensor']}/{match['quantity']}", [0.0] * num_layers)
                row[int(match["layer"])] = value if 0 <= value < float("inf") else 0.0
    return maps
