"""Hidden channels as plain values, and what a network costs with fewer of them. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from haloc.errors import FileFormatError, shown
from haloc.inventory import Inventory
from haloc.shapes import ConvShape, LinearShape, Shape


@dataclass(frozen=True)
class Hidden:
    """Channels that one layer makes, one layer reads, and nobody else sees.

    Attributes:
        consumer: The layer that reads them; its name is theirs.
        producer: The layer that makes them.
        carriers: What has weights for each of them in between: BatchNorms and depthwise convolutions.
        norm: The BatchNorm right behind the consumer, if there is one.
        width: How many there are.
        spare: Parameters per channel in carriers that are no layers, as a BatchNorm's two.
    """

    consumer: str
    producer: str
    carriers: tuple[str, ...]
    norm: str | None
    width: int
    spare: int = 0


@dataclass(frozen=True)
class Narrowed:
    """Hidden channels of which only some are left.

    Attributes:
        hidden: What they were.
        kept: How many are left.
    """

    hidden: Hidden
    kept: int

    def __str__(self) -> str:
        return f"{self.hidden.width}→{self.kept} channels from {self.hidden.producer} to {self.hidden.consumer}"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self.hidden), "carriers": list(self.hidden.carriers), "kept": self.kept}


def narrowed_from(value: Any) -> tuple[Narrowed, ...]:
    """Reads a list of what `Narrowed.to_dict` wrote, or says what is wrong with it."""
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise FileFormatError(f"narrowed channels are a list of objects, got {shown(value)}")
    try:
        return tuple(_narrowed(dict(row)) for row in value)
    except (TypeError, KeyError) as error:
        raise FileFormatError(f"narrowed channels are incomplete or malformed: {shown(error)}") from error


def _narrowed(row: dict[str, Any]) -> Narrowed:
    kept = row.pop("kept")
    names = [row["consumer"], row["producer"], *row["carriers"], *([row["norm"]] if row["norm"] is not None else [])]
    counts = [kept, row["width"]]
    if not all(isinstance(name, str) for name in names) or not all(type(count) is int for count in counts):
        raise FileFormatError(f"narrowed channels have names and whole numbers, got {shown(row)}")
    if not 1 <= kept <= row["width"]:
        raise FileFormatError(f"{shown(kept)} of {shown(row['width'])} channels cannot be kept")
    return Narrowed(Hidden(**row | {"carriers": tuple(row["carriers"])}), kept)


class Sizes:
    """What a network costs by the widths of its hidden channels.

    Args:
        layers: The dense network.
        hidden: What of it can be narrowed.
    """

    def __init__(self, layers: Inventory, hidden: Iterable[Hidden]) -> None:
        self.hidden = tuple(hidden)
        self._whole = {"macs": layers.macs, "params": layers.params}
        shapes = {layer.name: layer.shape for layer in layers if layer.calls}
        touched = [name for group in self.hidden for name in (group.producer, *group.carriers, group.consumer)]
        self._shapes = {name: shapes[name] for name in touched if name in shapes}

    def counts(self, widths: Mapping[str, int]) -> dict[str, int]:
        """Multiply-adds and parameters with these widths, by the names of the channels; others stay."""
        extents = {name: _extents(shape) for name, shape in self._shapes.items()}
        found = dict(self._whole)
        for group in self.hidden:
            width = widths.get(group.consumer, group.width)
            found["params"] -= group.spare * (group.width - width)
            for name in group.carriers:
                if name in extents:
                    extents[name] = (width, width)
            extents[group.producer] = (extents[group.producer][0], width)
            extents[group.consumer] = (width, extents[group.consumer][1])
        for name, shape in self._shapes.items():
            macs, params = _resized(shape, *extents[name])
            found["macs"] += macs - shape.macs
            found["params"] += params - shape.params
        return found


def _extents(shape: Shape) -> tuple[int, int]:
    if isinstance(shape, LinearShape):
        return shape.in_features, shape.out_features
    return shape.in_channels, shape.out_channels


def _resized(shape: Shape, inputs: int, outputs: int) -> tuple[int, int]:
    """Multiply-adds and parameters of a layer with other extents; a depthwise one has as many inputs as outputs."""
    before_in, before_out = _extents(shape)
    weights, biases = shape.params - before_out * shape.bias, outputs * shape.bias
    if isinstance(shape, ConvShape) and shape.groups > 1:
        return shape.macs // before_out * outputs, weights // before_out * outputs + biases
    pairs = before_in * before_out
    return shape.macs // pairs * inputs * outputs, weights // pairs * inputs * outputs + biases
