"""A map of what two ranks cost, against dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from haloc.report.page.axes import HEIGHT, LEFT, RIGHT, TOP, WIDTH
from haloc.report.page.markup import Markup, tag, together
from haloc.report.page.numbers import number, percent, quantity
from haloc.report.page.plots import sheet

#: Shares of dense that part the colours: four for faster, one for about the same, four for slower.
BOUNDS = (0.45, 0.65, 0.8, 0.95, 1.05, 1.25, 1.6, 2.2)
#: More columns than this have no room for numbers.
_MOST_NUMBERS = 8
#: A heat map stands a little higher than other charts: its lower axis has a name of its own line.
_BOTTOM, _CELL_HEIGHT = 276.0, 46.0

Plane = Mapping[tuple[int, int], Mapping[str, Any]]


def plane_of(points: Sequence[Mapping[str, Any]]) -> Plane:
    """Points of two ranks by (out, in); empty where they do not vary independently of each other."""
    pairs = {tuple(point["ranks"]): point for point in points if _two_numbers(point.get("ranks") or ())}
    outs, ins = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
    return {(a, b): point for (a, b), point in pairs.items()} if len(pairs) > max(len(outs), len(ins)) else {}


def _two_numbers(ranks: Sequence[Any]) -> bool:
    return len(ranks) == 2 and None not in map(number, ranks)


def heat_map(said: str, plane: Plane, dense: float | None, unit: str) -> Markup:
    """Columns of input ranks, rows of output ranks, the highest at the top; colour and number are shares of dense.

    Args:
        said: What it shows, for those who do not see it.
        plane: What was measured, by (rank out, rank in).
        dense: What the layer costs as it was.
        unit: The unit of the costs.
    """
    outs, ins = sorted({pair[0] for pair in plane}, reverse=True), sorted({pair[1] for pair in plane})
    width = (RIGHT - LEFT) / len(ins)
    tall = max(22.0, min(_CELL_HEIGHT, (_BOTTOM - TOP) / len(outs)))
    cells = [
        _cell(plane[pair], pair, (LEFT + column * width, TOP + row * tall, width, tall), dense, unit, len(ins))
        for row, out in enumerate(outs)
        for column, pair in enumerate((out, b) for b in ins)
        if pair in plane
    ]
    #: The ring of the chosen cell lies above its neighbours.
    cells.sort(key=lambda cell: "chosen" in cell)
    foot = TOP + tall * len(outs)
    return sheet(said, [*_labels(outs, ins, width, tall, foot), *cells], height=foot + HEIGHT - _BOTTOM)


def colour_key() -> Markup:
    """What the colours of a heat map mean."""
    swatches = [tag("span", class_=f"swatch h{number}") for number in range(len(BOUNDS) + 1)]
    return tag("p", tag("span", "faster than dense"), *swatches, tag("span", "slower"), class_="legend")


def _cell(
    point: Mapping[str, Any],
    pair: tuple[int, int],
    box: tuple[float, float, float, float],
    dense: float | None,
    unit: str,
    columns: int,
) -> Markup:
    x, y, width, height = box
    cost = number(point.get("cost"))
    share = cost / dense if cost is not None and dense else None
    tip = f"ranks {pair[0]} out, {pair[1]} in: {quantity(cost, unit, point.get('error'))}"
    tip += "" if share is None else f"\n{percent(share)} of dense"
    inside = {"x": x + 1, "y": y + 1, "width": width - 2, "height": height - 2, "rx": 3}
    parts = [tag("title", tip + ("\nchosen" if point.get("chosen") else "")), tag("rect", **inside)]
    if share is not None and columns <= _MOST_NUMBERS:
        parts.append(tag("text", f"{share:.2f}", x=x + width / 2, y=y + height / 2 + 5, class_="mid"))
    taken = " chosen" if point.get("chosen") else ""
    return tag("g", *parts, class_=f"m cell h{_colour(share)}{taken}")


def _colour(share: float | None) -> int:
    return len(BOUNDS) // 2 if share is None else sum(share > bound for bound in BOUNDS)


def _labels(outs: Sequence[int], ins: Sequence[int], width: float, tall: float, foot: float) -> list[Markup]:
    """Ranks along both sides, only as many as there is room for."""
    every = -(-len(ins) // _MOST_NUMBERS)
    rows = [tag("text", a, x=LEFT - 9, y=TOP + (n + 0.5) * tall + 5, class_="end") for n, a in enumerate(outs)]
    columns = [
        tag("text", b, x=LEFT + (n + 0.5) * width, y=foot + 22, class_="mid")
        for n, b in enumerate(ins)
        if n % every == 0
    ]
    titles = [tag("text", "rank out", x=8, y=18, class_="title")]
    titles += [tag("text", "share of dense", x=WIDTH - 16, y=18, class_="title end")]
    titles += [tag("text", "rank in", x=RIGHT, y=foot + 46, class_="title end")]
    return [together([*rows, *columns, *titles])]
