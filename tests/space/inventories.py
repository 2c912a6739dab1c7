"""Inventories made of shapes alone."""

from __future__ import annotations

from haloc.forms import families
from haloc.inventory import Inventory, LayerInfo


def inventory(*calls) -> Inventory:
    """Layers "a", "b", …, one for each of ``calls``: a shape, or several for a layer that is called more than once."""
    shapes = [call if isinstance(call, tuple) else (call,) for call in calls]
    layers = tuple(
        LayerInfo(name, "Layer", shape, shape[0].params, sum(s.macs for s in shape), families(shape[0]))
        for name, shape in zip("abcdefgh", shapes, strict=False)
    )
    return Inventory(layers, sum(layer.macs for layer in layers), sum(layer.params for layer in layers))
