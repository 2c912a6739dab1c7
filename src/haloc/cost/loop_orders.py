"""The order in which a PE of a row-stationary array works through its loops. Pure arithmetic, no torch and no engine.

Inside, a PE slides rows of the kernel along a piece of the input: all kernel columns, and as many output columns,
channels and filters as its scratch pads hold. One of the three tensors stays in its pad while the next loop around that
tile runs: weights over output columns, partial sums over channels, or inputs over filters. Everything else is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

from haloc.cost.eyeriss import Eyeriss
from haloc.cost.nest import Nest, touched

#: Loops from the innermost to the outermost, as (letter, how often).
Order = tuple[tuple[str, int], ...]

#: Into how many parts the scratch pads are split. With two, one part can be filled while the other is worked on.
PARTS = (1, 2)

#: The loop right around a tile, and the tensor that stays in its pad meanwhile.
STAYS = {"OX": "weights", "C": "sums", "K": "inputs"}


@dataclass(frozen=True, order=True)
class Tile:
    """What a PE does without a word from outside.

    Attributes:
        filters: How many filters it works on.
        channels: Of how many channels.
        columns: For how many output columns.
        taps: With how many kernel columns.
        reach: How many input columns that takes.
    """

    filters: int
    channels: int
    columns: int
    taps: int
    reach: int

    def moved(self, stays: str) -> float:
        """Words in and out per multiply-add if one of the tensors stays where it is."""
        words = {
            "inputs": self.channels * self.reach,
            "weights": self.taps * self.channels * self.filters,
            "sums": 2 * self.filters * self.columns,
        }
        macs = self.taps * self.channels * self.filters * self.columns
        return sum(count for tensor, count in words.items() if tensor != stays) / macs


def loop_orders(nest: Nest, remaining: Mapping[str, int], hardware: Eyeriss) -> list[Order]:
    """The orders worth trying for a layer of which ``remaining`` is not laid out side by side."""
    orders: dict[Order, None] = {}
    for parts in PARTS:
        tiles = list(_tiles(nest, remaining, hardware, parts))
        for around, stays in STAYS.items():
            if tiles:
                best = min(tiles, key=lambda tile: (tile.moved(stays), tile))
                orders.update(dict.fromkeys(_orders(best, around, remaining)))
    return list(orders)


def _tiles(nest: Nest, remaining: Mapping[str, int], hardware: Eyeriss, parts: int) -> Iterator[Tile]:
    """All tiles that fit into the scratch pads."""
    taps = remaining["FX"]
    sums, weights = hardware.psum_words // parts, hardware.filter_words // parts
    # A window too wide to be held twice is held once.
    inputs = max(hardware.ifmap_words // parts, min(taps, hardware.ifmap_words))
    for columns in _divisors(remaining["OX"], sums):
        reach = touched(columns, taps, nest.stride[1], nest.dilation[1], nest.input_size[1])
        for channels in _divisors(remaining["C"], inputs // reach):
            for filters in _divisors(remaining["K"], min(sums // columns, weights // (taps * channels))):
                yield Tile(filters, channels, columns, taps, reach)


def _orders(tile: Tile, around: str, remaining: Mapping[str, int]) -> Iterator[Order]:
    """The tile, one loop around it, and the others in all orders that keep output rows outside of columns."""
    inside = {"FX": tile.taps, "OX": tile.columns, "C": tile.channels, "K": tile.filters}
    rest = {loop: remaining[loop] // inside.get(loop, 1) for loop in ("OX", "OY", "C", "K")}
    outside = {loop: remaining[loop] for loop in ("FY", "G", "B")}
    first = {around: rest.pop(around)}
    for middle in permutations(rest.items()):
        letters = [loop for loop, _ in middle]
        if "OX" not in letters or letters.index("OX") < letters.index("OY"):
            loops = (*inside.items(), *first.items(), *middle, *outside.items())
            yield tuple((loop, count) for loop, count in loops if count > 1) or (("B", 1),)


def _divisors(number: int, most: int) -> Iterator[int]:
    return (count for count in range(1, min(number, most) + 1) if number % count == 0)
