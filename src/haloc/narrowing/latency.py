"""What a network takes by the widths of its hidden channels, as a target's clock says. No torch here.

Every layer has a price in its narrower shape, measured for some widths and predicted in between. As with ranks, the sum
over the layers leaves out what lies between them, so a few whole networks of random widths are timed too, and a small
linear model learns the rest and the slope from these.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import hypot, sqrt
from pathlib import Path
from typing import Any

import numpy as np

from haloc.cost.measure import RowKey
from haloc.cost.model import CostModel, Estimate
from haloc.cost.network import clocked, fitted_times, left_out_error
from haloc.cost.predict import LEAST_ROWS
from haloc.cost.table import target_in
from haloc.cost.target import Target
from haloc.errors import FileFormatError, SpecError, shown
from haloc.files import naming, read_json, write_json
from haloc.forms import Dense
from haloc.inventory import Inventory
from haloc.narrowing.hidden import Channels, extents, extents_with, offered_widths, touched_shapes, with_extents
from haloc.shapes import MOST, ConvShape, Shape, as_deployed

KIND = "haloc-widths"
FORMAT = 1

#: Into how many steps the widths of a group are cut for the rows that are measured; the finer ones only where a network
#: is so small that there would be too few rows to predict others by.
CUTS = (4, 8, 16)
#: Shares of the channels that random networks have on average, from wide to narrow, and how far single groups may be
#: from them: as narrow as budgets are likely to ask for.
WIDEST, NARROWEST, SPREAD = 0.9, 0.25, 0.25


@dataclass(frozen=True)
class WidthTiming:
    """The measured time of a whole network with these widths, by the names of its hidden channels; others are whole."""

    widths: Mapping[str, int]
    latency_ms: float
    iqr_ms: float = 0.0
    count: int = 1
    noisy: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.latency_ms, bool) or not self.latency_ms > 0:
            raise SpecError(f"a timing's latency_ms must be above 0, got {self.latency_ms!r}")


@dataclass(frozen=True)
class WidthTimings:
    """Narrowed networks timed on one target; goes to and from a JSON file.

    Attributes:
        target: Where they ran.
        network: Which network was narrowed, as `network_digest` has it.
        timings: One for each choice of widths.
        environment: Device name, driver, library versions and clocks.
    """

    target: Target
    network: str
    timings: tuple[WidthTiming, ...]
    environment: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Writes the timings as plain JSON values."""
        header = {"kind": KIND, "format": FORMAT, "target": self.target.to_dict(), "network": self.network}
        return header | {"environment": dict(self.environment), "timings": [asdict(each) for each in self.timings]}

    @classmethod
    def from_dict(cls, value: Any) -> WidthTimings:
        """Reads what `to_dict` wrote; anything else is refused with the reason."""
        if not isinstance(value, dict) or value.get("kind") != KIND or not isinstance(value.get("timings"), list):
            raise FileFormatError(f'not timings of narrowed networks: expected a JSON object with "kind": "{KIND}"')
        if value.get("format") != FORMAT:
            found = shown(value.get("format"))
            raise FileFormatError(f"timings format {found} is not known; this version reads {FORMAT}")
        if not isinstance(value.get("environment"), dict) or not isinstance(value.get("network"), str):
            raise FileFormatError('timings of narrowed networks need an "environment" (an object) and a "network"')
        try:
            timings = tuple(map(_timing, value["timings"]))
            return cls(target_in(value), value["network"], timings, value["environment"])
        except (FileFormatError, SpecError) as error:
            raise FileFormatError(f"a timing is incomplete or malformed: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes the timings as a JSON file, whole or not at all."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> WidthTimings:
        """Reads a file of timings."""
        with naming(path):
            return cls.from_dict(read_json(path))


def _timing(value: Any) -> WidthTiming:
    if not isinstance(value, dict) or not set(value) <= {field.name for field in fields(WidthTiming)}:
        raise FileFormatError(f"expected a timing, got {shown(value)}")
    widths = value.get("widths")
    if not isinstance(widths, dict) or not all(type(w) is int and 1 <= w <= MOST for w in widths.values()):
        raise FileFormatError(f"widths are whole numbers from 1, by name, got {shown(widths)}")
    return WidthTiming(widths, **clocked(value))


@dataclass(frozen=True)
class WidthCost:
    """The latency of a network by the widths of its hidden channels, with an error bar.

    Attributes:
        layers: The dense network.
        hidden: What of it can be narrowed.
        rows: Prices of layers: a table, or a predictor fitted on one.
        timings: Whole networks that were timed; none where there is no clock, as for the model of a chip, and the sum
            of the layers is all there is.
    """

    layers: Inventory
    hidden: tuple[Channels, ...]
    rows: CostModel
    timings: tuple[WidthTiming, ...] = ()

    @property
    def unit(self) -> str:
        """The unit of its values."""
        return self.rows.unit

    def of(self, widths: Mapping[str, int]) -> Estimate:
        """What the network takes with these widths, by the names of the channels; others are whole."""
        rows = self._sum(widths)
        if not self.timings:
            return rows
        rest, slope = self._coefficients
        value = float(rest + slope * rows.value)
        return Estimate(value, hypot(self.error * value, rows.error))

    @cached_property
    def error(self) -> float:
        """The relative error bar: twice the root mean square of the errors at timings that were left out."""
        return left_out_error(*self._known) if self.timings else 0.0

    @cached_property
    def _coefficients(self) -> np.ndarray:
        return fitted_times(*self._known)

    @cached_property
    def _known(self) -> tuple[np.ndarray, np.ndarray]:
        features = np.array([[1.0, self._sum(timing.widths).value] for timing in self.timings])
        return features, np.array([timing.latency_ms for timing in self.timings])

    def _sum(self, widths: Mapping[str, int]) -> Estimate:
        """What the layers add up to; a choice asks for thousands of widths, so each layer's price is asked for once."""
        value, square = self._untouched.value, self._untouched.error**2
        for name, (inputs, outputs) in extents_with(self._touched, self.hidden, widths).items():
            key = name, inputs, outputs
            if key not in self._asked:
                self._asked[key] = self.rows.price(with_extents(self._touched[name], inputs, outputs), Dense())
            value += self._asked[key].value
            square += self._asked[key].error ** 2
        return Estimate(value, sqrt(square))

    @cached_property
    def _touched(self) -> dict[str, Shape]:
        return touched_shapes(self.layers, self.hidden)

    @cached_property
    def _untouched(self) -> Estimate:
        calls = [call for layer in self.layers if layer.name not in self._touched for call in layer.calls]
        return sum((self.rows.price(call, Dense()) for call in calls), Estimate(0.0))

    @cached_property
    def _asked(self) -> dict[tuple[str, int, int], Estimate]:
        return {}


def width_rows(layers: Inventory, hidden: Sequence[Channels], round_to: int) -> tuple[RowKey, ...]:
    """The rows that tell what widths cost: every distinct layer, those that are touched at a few of their widths."""
    for cuts in CUTS:
        rows = _rows(layers, hidden, round_to, cuts)
        if len(rows) >= LEAST_ROWS:
            break
    return rows


def _rows(layers: Inventory, hidden: Sequence[Channels], round_to: int, cuts: int) -> tuple[RowKey, ...]:
    touched = touched_shapes(layers, hidden)
    calls = [call for layer in layers if layer.name not in touched for call in layer.calls]
    inputs, outputs = _grids(touched, hidden, round_to, cuts)
    for name, shape in touched.items():
        calls += [with_extents(shape, *pair) for pair in _pairs(shape, inputs.get(name), outputs.get(name))]
    return tuple((shape, Dense()) for shape in dict.fromkeys(map(as_deployed, calls)))


#: For a layer's name some of the widths of the channels on one of its sides, the most first.
Grids = dict[str, tuple[int, ...]]


def _grids(touched: Mapping[str, Shape], hidden: Sequence[Channels], round_to: int, cuts: int) -> tuple[Grids, Grids]:
    """Widths of what layers read, and of what they make."""
    inputs: Grids = {}
    outputs: Grids = {}
    for group in hidden:
        offered = offered_widths(group.width, round_to)
        grid = tuple(_nearest(offered, part / cuts * group.width) for part in range(cuts, 0, -1))
        inputs |= {name: grid for name in (*group.readers, *group.carriers) if name in touched}
        outputs |= {name: grid for name in (*group.makers, *group.carriers) if name in touched}
    return inputs, outputs


def _nearest(offered: Sequence[int], wanted: float) -> int:
    return min(offered, key=lambda width: abs(width - wanted))


def _pairs(shape: Shape, inputs: Sequence[int] | None, outputs: Sequence[int] | None) -> list[tuple[int, int]]:
    """Input and output channels to be measured; where both can be narrowed, together and each one by half."""
    whole = extents(shape)
    if inputs is None or outputs is None:
        return [(width, whole[1]) for width in inputs or ()] + [(whole[0], width) for width in outputs or ()]
    together = list(zip(inputs, outputs, strict=True))
    half = len(inputs) // 2
    return (
        together
        if isinstance(shape, ConvShape) and shape.depthwise
        else [*together, (inputs[0], outputs[half]), (inputs[half], outputs[0])]
    )


def sample_widths(hidden: Sequence[Channels], round_to: int, count: int, seed: int = 0) -> tuple[dict[str, int], ...]:
    """The whole network and random narrower ones, from wide to narrow, by their widths; no two are alike."""
    draw = random.Random(seed)
    shares = [float(share) for share in np.linspace(WIDEST, NARROWEST, max(0, count - 1))]
    found = [{group.consumer: group.width for group in hidden}][:count]
    for share in shares:
        drawn = {group.consumer: _drawn(group, round_to, share, draw) for group in hidden}
        found += [drawn] if drawn not in found else []
    return tuple(found)


def _drawn(group: Channels, round_to: int, share: float, draw: random.Random) -> int:
    wanted = group.width * (share + draw.uniform(-SPREAD, SPREAD))
    return _nearest(offered_widths(group.width, round_to), wanted)


def network_digest(layers: Inventory, hidden: Sequence[Channels]) -> str:
    """A short text that is another one for a network of other layers, sizes or hidden channels."""
    value = [layers.to_dict(), [asdict(group) for group in hidden]]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
