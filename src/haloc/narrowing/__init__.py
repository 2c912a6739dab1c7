"""Narrowing: fewer channels between two layers, what the others said being told by those that stay.

Low rank as everywhere else, in one form more. The channels that one layer hands to another are written as combinations
of some of them (an interpolative decomposition), so that one factor is a choice of channels. A choice commutes with
whatever treats channels one by one, ReLU, BatchNorm or a depthwise convolution, and goes into the layer before; the
other factor goes into the layer behind. No layer is added, all of them get narrower.
"""

from haloc.narrowing.find import hidden_channels
from haloc.narrowing.hidden import Channels, Hidden, Narrowed, Stream, kept_widths
from haloc.narrowing.latency import WidthCost
from haloc.narrowing.narrow import NarrowSettings, narrow
from haloc.narrowing.surgery import narrowed_of, resized
from haloc.narrowing.timing import measure_widths

__all__ = [
    "Channels",
    "Hidden",
    "NarrowSettings",
    "Narrowed",
    "Stream",
    "WidthCost",
    "hidden_channels",
    "kept_widths",
    "measure_widths",
    "narrow",
    "narrowed_of",
    "resized",
]
