"""Hidden channels as plain values, and what a network costs with fewer of them. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from haloc.errors import FileFormatError, shown
from haloc.inventory import Inventory
from haloc.shapes import LinearShape, Shape


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

    @property
    def makers(self) -> tuple[str, ...]:
        """The layers that make them."""
        return (self.producer,)

    @property
    def readers(self) -> dict[str, str | None]:
        """The layers that read them, each with the BatchNorm right behind it, if there is one."""
        return {self.consumer: self.norm}


@dataclass(frozen=True)
class Stream:
    """Channels that nothing is done with but to add them up: some layers make them, some read them.

    Attributes:
        consumers: The layers that read them; the name of the first is theirs.
        producers: The layers that make them.
        norms: The BatchNorm right behind every consumer, if there is one.
        sources: The BatchNorm right behind every producer, if there is one.
        width: How many there are.
        spare: Parameters per channel in the norms behind producers.
    """

    consumers: tuple[str, ...]
    producers: tuple[str, ...]
    norms: tuple[str | None, ...]
    sources: tuple[str | None, ...]
    width: int
    spare: int = 0

    @property
    def consumer(self) -> str:
        """What they are called by."""
        return self.consumers[0]

    @property
    def makers(self) -> tuple[str, ...]:
        """The layers that make them."""
        return self.producers

    @property
    def readers(self) -> dict[str, str | None]:
        """The layers that read them, each with the BatchNorm right behind it, if there is one."""
        return dict(zip(self.consumers, self.norms, strict=True))

    @property
    def carriers(self) -> tuple[str, ...]:
        """What has weights for each of them besides: the BatchNorms behind producers."""
        return tuple(name for name in self.sources if name is not None)


#: Channels that can be made fewer.
Channels = Hidden | Stream


@dataclass(frozen=True)
class Narrowed:
    """Channels of which only some are left.

    Attributes:
        hidden: What they were.
        kept: How many are left.
    """

    hidden: Channels
    kept: int

    def __str__(self) -> str:
        makers, readers = ", ".join(self.hidden.makers), ", ".join(self.hidden.readers)
        return f"{self.hidden.width}→{self.kept} channels from {makers} to {readers}"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        fields = asdict(self.hidden).items()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields} | {
            "kept": self.kept
        }


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
    channels = _stream(row) if "consumers" in row else _hidden(row)
    names = [*channels.makers, *channels.readers, *channels.carriers, *channels.readers.values()]
    counts = [kept, channels.width, channels.spare]
    if not all(isinstance(name, str | None) for name in names) or not all(type(count) is int for count in counts):
        raise FileFormatError(f"narrowed channels have names and whole numbers, got {shown(row)}")
    if not 1 <= kept <= channels.width:
        raise FileFormatError(f"{shown(kept)} of {shown(channels.width)} channels cannot be kept")
    return Narrowed(channels, kept)


def _hidden(row: dict[str, Any]) -> Hidden:
    return Hidden(**row | {"carriers": _several(row["carriers"])})


def _stream(row: dict[str, Any]) -> Stream:
    found = Stream(**row | {name: _several(row[name]) for name in ("consumers", "producers", "norms", "sources")})
    pairs = (len(found.consumers), len(found.producers)), (len(found.norms), len(found.sources))
    if pairs[0] != pairs[1] or not all(pairs[0]) or len(set(found.consumers)) != len(found.consumers):
        raise FileFormatError(f"every layer of a stream has a norm or none, got {shown(row)}")
    return found


def _several(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise FileFormatError(f"expected a list of names, got {shown(value)}")
    return tuple(value)


def kept_widths(narrowed: Iterable[Narrowed]) -> dict[str, int]:
    """How many channels are left of each that was narrowed, by its name."""
    return {each.hidden.consumer: each.kept for each in narrowed}


def offered_widths(width: int, round_to: int) -> tuple[int, ...]:
    """All that so many channels may become, the most first: what they were, and multiples of ``round_to`` below."""
    return width, *range((width - 1) // round_to * round_to, 0, -round_to)


def touched_shapes(layers: Inventory, hidden: Iterable[Channels]) -> dict[str, Shape]:
    """The shapes of the layers that have weights for hidden channels, by name; such layers run once."""
    shapes = {layer.name: layer.shape for layer in layers if layer.calls}
    touched = [name for group in hidden for name in (*group.makers, *group.carriers, *group.readers)]
    return {name: shapes[name] for name in touched if name in shapes}


def extents_with(
    shapes: Mapping[str, Shape], hidden: Iterable[Channels], widths: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
    """Input and output channels of every touched layer with these widths, by the names of the channels; others stay."""
    found = {name: extents(shape) for name, shape in shapes.items()}
    for group in hidden:
        width = widths.get(group.consumer, group.width)
        for name in group.carriers:
            if name in found:
                found[name] = (width, width)
        for name in group.makers:
            found[name] = (found[name][0], width)
        for name in group.readers:
            found[name] = (width, found[name][1])
    return found


def extents(shape: Shape) -> tuple[int, int]:
    """Input and output channels of a layer."""
    if isinstance(shape, LinearShape):
        return shape.in_features, shape.out_features
    return shape.in_channels, shape.out_channels


def with_extents(shape: Shape, inputs: int, outputs: int) -> Shape:
    """The layer with other channels; a depthwise one has as many groups as outputs."""
    if isinstance(shape, LinearShape):
        return replace(shape, in_features=inputs, out_features=outputs)
    groups = outputs if shape.depthwise else shape.groups
    return replace(shape, in_channels=inputs, out_channels=outputs, groups=groups)


class Sizes:
    """What a network costs by the widths of its hidden channels.

    Args:
        layers: The dense network.
        hidden: What of it can be narrowed.
    """

    def __init__(self, layers: Inventory, hidden: Iterable[Channels]) -> None:
        self.hidden = tuple(hidden)
        self._whole = {"macs": layers.macs, "params": layers.params}
        self._shapes = touched_shapes(layers, self.hidden)
        self._more: dict[tuple[str, int, int], tuple[int, int]] = {}

    def counts(self, widths: Mapping[str, int]) -> dict[str, int]:
        """Multiply-adds and parameters with these widths, by the names of the channels; others stay."""
        found = dict(self._whole)
        for group in self.hidden:
            found["params"] -= group.spare * (group.width - widths.get(group.consumer, group.width))
        for name, pair in extents_with(self._shapes, self.hidden, widths).items():
            macs, params = self._change(name, *pair)
            found["macs"] += macs
            found["params"] += params
        return found

    def _change(self, name: str, inputs: int, outputs: int) -> tuple[int, int]:
        """By how much a layer's counts change with other channels; a choice asks for the same ones over and over."""
        key = name, inputs, outputs
        if key not in self._more:
            shape, other = self._shapes[name], with_extents(self._shapes[name], inputs, outputs)
            self._more[key] = other.macs - shape.macs, other.params - shape.params
        return self._more[key]
