"""From values to places on a chart, and the ticks between."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, log10

from haloc.report.page.markup import Markup, tag, together
from haloc.report.page.numbers import prefix_for

#: The sheet of a chart, in its own units; the page scales it. The margins hold labels of the size that phones get.
WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, TOP, BOTTOM = 66, 544, 38, 276


@dataclass(frozen=True)
class Scale:
    """A straight line from values to places.

    Attributes:
        low: The value at the start.
        high: The value at the end.
        start: The place of the lowest value.
        end: The place of the highest.
    """

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The place of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


@dataclass(frozen=True)
class Axis:
    """What an axis says.

    Attributes:
        title: What is on it.
        unit: Its unit; empty for counts.
        zero: Whether it begins at zero.
        whole: Whether only whole numbers make sense.
    """

    title: str
    unit: str = ""
    zero: bool = False
    whole: bool = False

    @property
    def label(self) -> str:
        """The title with its unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    def scale(self, values: Iterable[float], start: float, end: float) -> Scale:
        """A scale that holds all values, with a little air around them."""
        held = list(values) or [0.0]
        low, high = min(held), max(held)
        low = min(0.0, low) if self.zero else low
        if high <= low:
            low, high = (low, low + 1.0) if self.zero else (low - 0.5, high + 0.5)
        air = 0.05 * (high - low)
        below = 0.0 if self.zero and low == 0 else air
        return Scale(low - below, high + air, start, end)


def ticks(low: float, high: float, about: int = 6, *, whole: bool = False) -> list[float]:
    """Round values between two bounds, about so many."""
    rough = (high - low) / max(1, about - 1)
    power = 10.0 ** floor(log10(rough))
    step = next(power * lead for lead in (1, 2, 2.5, 5, 10) if power * lead >= rough * 0.85)
    step = max(1.0, float(ceil(step))) if whole else step
    first = ceil(low / step - 1e-9)
    return [round(step * n, 12) for n in range(first, floor(high / step + 1e-9) + 1)]


def tick_labels(values: list[float]) -> list[str]:
    """As few digits as tell the ticks apart, large ones with a letter."""
    factor, letter = prefix_for(max(map(abs, values), default=0.0))
    shown = [value / factor for value in values]
    places = next((n for n in range(7) if all(abs(round(v, n) - v) < 1e-9 for v in shown)), 7)
    return [f"{value:.{places}f}{' ' if letter else ''}{letter}" if value else "0" for value in shown]


def frame(x: Scale, y: Scale, across: Axis, up: Axis) -> Markup:
    """Grid, ticks and titles; the title of the upright axis lies above it, where it can be read."""
    columns, rows = ticks(x.low, x.high, 7, whole=across.whole), ticks(y.low, y.high, 6, whole=up.whole)
    parts = [_row(y(at), label) for at, label in zip(rows, tick_labels(rows), strict=True)]
    parts += [_column(x(at), label) for at, label in zip(columns, tick_labels(columns), strict=True)]
    parts.append(tag("line", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM, class_="axis"))
    parts.append(tag("text", up.label, x=8, y=18, class_="title"))
    parts.append(tag("text", across.label, x=RIGHT, y=HEIGHT - 8, class_="title end"))
    return together(parts)


def _row(at: float, label: str) -> Markup:
    line = tag("line", x1=LEFT, x2=RIGHT, y1=at, y2=at, class_="grid")
    return together([line, tag("text", label, x=LEFT - 9, y=at + 5, class_="end")])


def _column(at: float, label: str) -> Markup:
    line = tag("line", x1=at, x2=at, y1=BOTTOM, y2=BOTTOM + 5, class_="axis")
    return together([line, tag("text", label, x=at, y=BOTTOM + 22, class_="mid")])
