"""Charts of lines and points, as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from haloc.report.page.axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Scale, frame
from haloc.report.page.markup import Markup, tag, together

#: More points than this have no room for a mark each; the mark shows when it is pointed at.
_MOST_MARKS = 40
#: How long the name of a level is, about.
_WORDS = 140


@dataclass(frozen=True)
class Point:
    """One point of a chart.

    Attributes:
        x: Where across.
        y: Where up.
        tip: What is said of it when it is pointed at.
        x_error: Half the width of its error bar.
        y_error: Half the height of its error bar.
        chosen: Whether it is the one that was taken.
    """

    x: float
    y: float
    tip: str
    x_error: float = 0.0
    y_error: float = 0.0
    chosen: bool = False


@dataclass(frozen=True)
class Line:
    """Points that belong together.

    Attributes:
        name: What they are, for the legend.
        points: From left to right.
        style: The class that gives them their colour.
        shape: Which mark they have, so that colour is not all that tells them apart.
        drawn: How they are joined: "straight", "steps" or "not".
    """

    name: str
    points: Sequence[Point]
    style: str
    shape: int = 0
    drawn: str = "straight"


@dataclass(frozen=True)
class Level:
    """A value to compare with, across the whole chart.

    Attributes:
        value: The value.
        name: What it is.
        style: The class that gives it its colour: "dense" or "budget".
    """

    value: float
    name: str
    style: str = "dense"


def plot(
    said: str, lines: Sequence[Line], across: Axis, up: Axis, levels: Sequence[Level] = (), *, identity: bool = False
) -> Markup:
    """A chart of lines and points.

    Args:
        said: What it shows, for those who do not see it.
        lines: What is drawn.
        across: The axis from left to right.
        up: The axis from bottom to top.
        levels: Values to compare with.
        identity: Draws where both axes say the same, and gives both the same range.
    """
    x, y = _scales(lines, across, up, levels, identity)
    parts = [frame(x, y, across, up)]
    if identity:
        parts.append(tag("line", x1=x(x.low), y1=y(y.low), x2=x(x.high), y2=y(y.high), class_="identity"))
    parts += [_level(y(level.value), level) for level in levels]
    parts += [_joined(line, x, y) for line in lines]
    parts += [_mark(point, line, x, y) for line in lines for point in line.points]
    parts += [_chosen(line, number, x, y) for line in lines for number, p in enumerate(line.points) if p.chosen]
    parts += [_level_name(y(level.value), level, lines, x, y) for level in levels]
    return sheet(said, parts)


def sheet(said: str, parts: Sequence[Markup], height: float = HEIGHT) -> Markup:
    """An SVG that scales with the page."""
    attributes = {"class_": "chart", "viewBox": f"0 0 {WIDTH} {height:g}", "role": "img", "aria_label": said}
    return tag("svg", *parts, data_marks=True, **attributes)


def legend(lines: Sequence[Line]) -> Markup:
    """The names of the lines with their marks; nothing where there is only one to name."""
    if len(lines) < 2:
        return Markup()
    entries = [tag("li", key(line.style, line.shape), line.name) for line in lines]
    return tag("ul", *entries, class_="legend")


def key(style: str, shape: int) -> Markup:
    """A mark as a legend shows it."""
    return tag("svg", _shape(shape, 8, 8), class_=f"key {style}", viewBox="2 2 12 12", aria_hidden="true")


def _scales(
    lines: Sequence[Line], across: Axis, up: Axis, levels: Sequence[Level], identity: bool
) -> tuple[Scale, Scale]:
    points = [point for line in lines for point in line.points]
    xs = [p.x + side * p.x_error for p in points for side in (-1, 1)]
    ys = [p.y + side * p.y_error for p in points for side in (-1, 1)] + [level.value for level in levels]
    if identity:
        xs = ys = xs + ys
    return across.scale(xs, LEFT, RIGHT), up.scale(ys, BOTTOM, TOP)


def _level(at: float, level: Level) -> Markup:
    return tag("g", tag("line", x1=LEFT, x2=RIGHT, y1=at, y2=at, class_="level"), class_=level.style)


def _level_name(at: float, level: Level, lines: Sequence[Line], x: Scale, y: Scale) -> Markup:
    """The name of a level, above or below it at one end, where the points leave most room."""
    places = [(x(point.x), y(point.y)) for line in lines for point in line.points]
    heights = [height for height in (at - 6, at + 18) if TOP - 8 < height < BOTTOM - 4]
    corners = [(side, height) for height in heights or [at - 6] for side in ("end", "start")]
    side, height = max(corners, key=lambda corner: _room(corner[0], corner[1], places))
    across = RIGHT - 2 if side == "end" else LEFT + 4
    return tag("g", tag("text", level.name, x=across, y=height, class_=f"halo {side}"), class_=level.style)


def _room(side: str, height: float, places: Sequence[tuple[float, float]]) -> float:
    """How far the nearest point is from words at one end; beyond a word's width more is no better."""
    near = [abs(y - height + 6) for x, y in places if (x > RIGHT - _WORDS if side == "end" else x < LEFT + _WORDS)]
    return min([*near, 30.0])


def _joined(line: Line, x: Scale, y: Scale) -> Markup:
    if line.drawn == "not" or len(line.points) < 2:
        return Markup()
    path = f"M{x(line.points[0].x):.1f} {y(line.points[0].y):.1f}"
    for point in line.points[1:]:
        turn = f"H{x(point.x):.1f}V{y(point.y):.1f}" if line.drawn == "steps" else ""
        path += turn or f"L{x(point.x):.1f} {y(point.y):.1f}"
    return tag("path", d=path, class_=f"line {line.style}")


def _mark(point: Point, line: Line, x: Scale, y: Scale) -> Markup:
    """A point with its error bars and an area around it that a finger can hit."""
    at_x, at_y = x(point.x), y(point.y)
    parts = [tag("title", point.tip), tag("circle", cx=at_x, cy=at_y, r=13, class_="hit")]
    if point.y_error:
        parts.append(_bar(at_x, y(point.y - point.y_error), at_x, y(point.y + point.y_error)))
    if point.x_error:
        parts.append(_bar(x(point.x - point.x_error), at_y, x(point.x + point.x_error), at_y))
    faint = " faint" if len(line.points) > _MOST_MARKS and not point.chosen else ""
    return tag("g", *parts, _shape(line.shape, at_x, at_y), class_=f"m {line.style}{faint}")


def _bar(x1: float, y1: float, x2: float, y2: float) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_="error")


def _chosen(line: Line, number: int, x: Scale, y: Scale) -> Markup:
    """A ring and a word, on the side that the line does not go to, inside the sheet."""
    at_x, at_y = x(line.points[number].x), y(line.points[number].y)
    after = line.points[min(number + 1, len(line.points) - 1)]
    right = (after.y <= line.points[number].y or at_x < LEFT + 80) and at_x < RIGHT - 80
    place = {"x": at_x + 9, "class_": "halo strong"} if right else {"x": at_x - 9, "class_": "halo strong end"}
    word = tag("text", "chosen", y=at_y - 11 if at_y > TOP + 16 else at_y + 24, **place)
    return together([tag("circle", cx=at_x, cy=at_y, r=9, class_="ring"), word])


def _shape(number: int, x: float, y: float) -> Markup:
    """Circle, square, diamond, triangle."""
    if number % 4 == 0:
        return tag("circle", cx=x, cy=y, r=4.5, class_="dot")
    corners = (
        ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        ((0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)),
        ((0, -5), (5, 4), (-5, 4)),
    )[number % 4 - 1]
    return tag("path", d="M" + "L".join(f"{x + dx:.1f} {y + dy:.1f}" for dx, dy in corners) + "Z", class_="dot")
