"""Owns heat maps over layers: FP8 series of single tensors put together by what they are of. Imports no torch.

wandb draws a series of histograms as a map of colours, steps across and bins upwards. Here a bin is a layer and its
"count" is the value, so that one picture shows one quantity of one operand in all layers.
"""

import re
from collections.abc import Mapping

_OF_A_LAYER = re.compile(r"fp8/layers\.(\d+)/(.+)/(amax|scale|clipped|flushed)")


def layer_maps(values: Mapping[str, float], num_layers: int) -> dict[str, list[float]]:
    """By `fp8 map/<linear layer>/<operand>/<quantity>` the values of layers 0 to `num_layers` - 1.

    0 stands for a layer that is not in FP8, and for what is not finite.
    """
    maps: dict[str, list[float]] = {}
    for name, value in values.items():
        match = _OF_A_LAYER.fullmatch(name)
        if match is not None:
            layer, operand, quantity = int(match[1]), match[2], match[3]
            row = maps.setdefault(f"fp8 map/{operand}/{quantity}", [0.0] * num_layers)
            row[layer] = value if 0 <= value < float("inf") else 0.0
    return maps
