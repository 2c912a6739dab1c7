"""What the ranks of the most expensive layers cost: steps over one rank, a map over two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from haloc.report.page.axes import Axis
from haloc.report.page.heat import colour_key, heat_map, plane_of
from haloc.report.page.markup import Markup
from haloc.report.page.numbers import number, percent, quantity
from haloc.report.page.pieces import FORMS, body, card, cards, rows_of, styled, word
from haloc.report.page.plots import Level, Line, Point, legend, plot

_LEAD = (
    "Latency does not fall evenly with the rank: hardware works in blocks, and some ranks cost more than larger ones. "
    "These are the measured costs of the most expensive layers, against the layer as it was."
)


def staircases(report: Mapping[str, Any]) -> Markup:
    """A chart for every layer, and a map more where two ranks vary independently."""
    drawn = [chart for row in rows_of(report, "staircases") for chart in _charts(row)]
    return body(cards(*drawn), lead=_LEAD)


def _charts(row: Mapping[str, Any]) -> list[Markup]:
    families = rows_of(row, "families")
    planes = [family for family in families if plane_of(rows_of(family, "points"))]
    lines = [_line(family, row, n) for n, family in enumerate(families) if family not in planes]
    lines = [line for line in lines if line.points]
    return [_map(row, family) for family in planes] + ([_steps(row, lines)] if lines else [])


def _note(row: Mapping[str, Any]) -> str:
    count = number(row.get("count")) or 1
    alike = f"{count:.0f} layers of this shape" if count > 1 else "one layer of this shape"
    return f"{alike}; dense {quantity(row.get('dense'), _unit(row))}"


def _unit(row: Mapping[str, Any]) -> str:
    return word(row, "unit")


def _steps(row: Mapping[str, Any], lines: Sequence[Line]) -> Markup:
    unit, dense = _unit(row), number(row.get("dense"))
    levels = [] if dense is None else [Level(dense, f"dense {quantity(dense, unit)}")]
    across, up = Axis("rank", zero=True, whole=True), Axis("cost" if unit != "ms" else "latency", unit, zero=True)
    said = f"{word(row, 'layer')}: cost over rank, {', '.join(line.name for line in lines)}"
    return card(_title(row), plot(said, lines, across, up, levels), legend(lines), note=_note(row))


def _map(row: Mapping[str, Any], family: Mapping[str, Any]) -> Markup:
    plane, dense = plane_of(rows_of(family, "points")), number(row.get("dense"))
    said = f"{word(row, 'layer')}: cost of {FORMS.get(str(family.get('form_kind')), 'a form')} over both ranks"
    drawn = heat_map(said, plane, dense, _unit(row))
    return card(_title(row, family), drawn, colour_key(), note=_note(row))


def _title(row: Mapping[str, Any], family: Mapping[str, Any] | None = None) -> str:
    kind = "" if family is None else f", {FORMS.get(str(family.get('form_kind')), word(family, 'form_kind'))}"
    return f"{word(row, 'layer')}{kind}"


def _line(family: Mapping[str, Any], row: Mapping[str, Any], shape: int) -> Line:
    kind = word(family, "form_kind")
    points = [_point(point, row) for point in rows_of(family, "points") if _drawable(point)]
    points.sort(key=lambda point: point.x)
    return Line(FORMS.get(kind, kind), _apart(points, family), styled(kind), shape, drawn="steps")


def _drawable(point: Mapping[str, Any]) -> bool:
    ranks: Sequence[Any] = point.get("ranks") or ()
    return bool(ranks) and number(ranks[0]) is not None and number(point.get("cost")) is not None


def _apart(points: list[Point], family: Mapping[str, Any]) -> list[Point]:
    """Where the first rank is the same everywhere, the second is what varies."""
    given = [point for point in rows_of(family, "points") if _drawable(point)]
    if len({point.x for point in points}) > 1 or any(len(point["ranks"]) < 2 for point in given):
        return points
    second = sorted((float(point["ranks"][1]), n) for n, point in enumerate(given))
    return [Point(**{**vars(points[n]), "x": rank}) for rank, n in second]


def _point(point: Mapping[str, Any], row: Mapping[str, Any]) -> Point:
    cost, error, dense = float(point["cost"]), number(point.get("error")) or 0.0, number(row.get("dense"))
    tip = f"rank {'·'.join(map(str, point['ranks']))}: {quantity(cost, _unit(row), error)}"
    tip += f"\n{percent(cost / dense)} of dense" if dense else ""
    chosen = bool(point.get("chosen"))
    return Point(float(point["ranks"][0]), cost, tip + "\nchosen" * chosen, y_error=error, chosen=chosen)
