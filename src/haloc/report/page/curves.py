"""Curves over time and trade-offs: the search, the Pareto curve, predicted against measured, fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from haloc.report.page.axes import Axis
from haloc.report.page.markup import Markup
from haloc.report.page.numbers import duration, number, percent, quantity
from haloc.report.page.pieces import body, card, cards, part_of, rows_of, settings, word
from haloc.report.page.plots import Level, Line, Point, legend, plot
from haloc.report.page.tables import Cell, Column, table

#: What counts the rows of a history, and what in a row is no figure of how well it goes.
_CLOCKS = ("epoch", "generation", "round", "step")
_SKIPPED = frozenset({*_CLOCKS, "seconds", "lr", "images_per_s"})
#: Figures that share a chart with another one.
_TOPICS = {"cross_entropy": "loss", "best": "loss", "mean": "loss", "top1": "accuracy"}
_FRACTIONS = frozenset({"accuracy", "top1", "top5"})
_SAID = {"macs": "multiply-adds", "params": "parameters", "top1": "top-1 accuracy", "top5": "top-5 accuracy"}
_MOST_CHARTS = 6


#: What stands in the place of a method where nobody chose.
GIVEN, NOT_NEEDED = "a given plan", "none"
_NOBODY = {GIVEN: "The plan was given", NOT_NEEDED: "Narrowing alone keeps to the budgets, no ranks were chosen"}


def search(report: Mapping[str, Any]) -> Markup:
    """How the search went, epoch by epoch, against its budgets."""
    found = part_of(report, "search")
    if not found:
        return Markup()
    method = word(found, "method")
    who = _NOBODY.get(method) or f"Method {method}, {duration(found.get('seconds'))}"
    lead = f"{who}. {_kept_to(found)}"
    drawn = list(history_charts(rows_of(found, "history"), rows_of(found, "budgets")))
    return body(cards(*drawn), settings(part_of(found, "settings")) or Markup(" "), lead=lead)


def finetune(report: Mapping[str, Any]) -> Markup:
    """How accuracy came back."""
    found = part_of(report, "finetune")
    drawn = list(history_charts(rows_of(found, "history"), (), number(found.get("before"))))
    if not drawn:
        return Markup()
    lead = f"{len(rows_of(found, 'history'))} epochs, {duration(found.get('seconds'))}."
    return body(cards(*drawn), settings(part_of(found, "settings")), lead=lead)


def pareto(report: Mapping[str, Any]) -> Markup:
    """What the network loses as it gets cheaper."""
    found = part_of(report, "pareto")
    points = [point for point in rows_of(found, "points") if number(point.get("cost")) is not None]
    scored = bool(points) and all(number(point.get("score")) is not None for point in points)
    name = "score" if scored else "loss"
    points = sorted((p for p in points if number(p.get(name)) is not None), key=lambda p: float(p["cost"]))
    if not points:
        return Markup()
    quantity_, unit = str(found.get("quantity") or "cost"), word(found, "unit")
    line = Line("networks", [_trade(point, name, unit) for point in points], "s0")
    said = _SAID.get(quantity_, quantity_)
    up = Axis("score" if scored else "expected loss, less is better")
    drawn = plot(f"{up.title} over {said}", [line], Axis(said, unit, zero=True), up)
    title = f"{up.title.split(',')[0]} over {said}".capitalize()
    chart = card(title, drawn, note=f"dense {quantity(found.get('dense'), unit)}")
    lead = "One search serves many budgets: each point is the best network within one."
    return body(cards(chart, _trade_table(points, said, name, unit)), lead=lead)


def prediction(report: Mapping[str, Any]) -> Markup:
    """What the table foretold, and what the whole network measured."""
    found = part_of(report, "prediction")
    points = [
        point for point in rows_of(found, "points") if None not in (_of(point, "predicted"), _of(point, "measured"))
    ]
    if not points:
        return Markup()
    unit = word(found, "unit")
    lines = [
        Line(said, [_foretold(point, unit) for point in group], style, shape, drawn="not")
        for said, group, style, shape in (
            ("networks that the prediction was fitted on", [p for p in points if p.get("role") != "result"], "s5", 1),
            ("the results", [p for p in points if p.get("role") == "result"], "s1", 0),
        )
        if group
    ]
    drawn = plot("measured over predicted", lines, Axis("predicted", unit), Axis("measured", unit), identity=True)
    error = number(found.get("error"))
    lead = "On the line, prediction and measurement agree."
    lead += "" if error is None else f" The prediction puts its own error at {percent(error)}."
    chart = card("Measured over predicted", drawn, legend(lines))
    return body(cards(chart, _foretold_table(points, unit)), lead=lead)


def history_charts(
    rows: Sequence[Mapping[str, Any]], budgets: Sequence[Mapping[str, Any]] = (), before: float | None = None
) -> Iterator[Markup]:
    """A chart for everything that a history tells; figures of one thing, of training and validation, share one."""
    if not rows:
        return
    clock = next((name for name in _CLOCKS if any(number(row.get(name)) is not None for row in rows)), "")
    grouped: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for row in rows for name in row if number(row[name]) is not None):
        if name not in _SKIPPED:
            grouped.setdefault(_topic(name), []).append(name)
    for topic, names in list(grouped.items())[:_MOST_CHARTS]:
        unit = next((word(row, "unit") for row in budgets if row.get("name") == topic), "")
        yield _history_chart(topic, names, rows, clock, unit, _levels(topic, budgets, before))


def _topic(name: str) -> str:
    bare = name.removeprefix("val_")
    for prefix in ("expected_", "likeliest_"):
        bare = bare.removeprefix(prefix)
    return _TOPICS.get(bare, bare)


def _levels(topic: str, budgets: Sequence[Mapping[str, Any]], before: float | None) -> list[Level]:
    found = []
    for row in budgets:
        budget, unit = number(row.get("budget")), word(row, "unit")
        if row.get("name") == topic and budget is not None:
            found.append(Level(budget, f"budget {quantity(budget, unit)}", "budget"))
    if before is not None and topic in ("accuracy", "score"):
        share = topic in _FRACTIONS
        found.append(
            Level(before * 100 if share else before, f"before {percent(before, 2) if share else f'{before:.4g}'}")
        )
    return found


def _history_chart(
    topic: str,
    names: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    clock: str,
    unit: str,
    levels: Sequence[Level],
) -> Markup:
    share = topic in _FRACTIONS
    lines = [
        Line(_spelled(name), list(_over_time(name, rows, clock, 100.0 if share else 1.0)), f"s{n % 5}", n)
        for n, name in enumerate(names)
    ]
    said = _SAID.get(topic, topic).replace("_", " ")
    up = Axis(said, "%" if share else unit)
    drawn = plot(f"{said} over {clock}s", lines, Axis(clock or "row", whole=True), up, levels)
    return card(said.capitalize(), drawn, legend(lines))


def _spelled(name: str) -> str:
    said = name.removeprefix("val_").replace("_", " ")
    for short, long in _SAID.items():
        said = said.replace(short, long)
    return f"{said}, {'validation' if name.startswith('val_') else 'training'}"


def _over_time(name: str, rows: Sequence[Mapping[str, Any]], clock: str, factor: float) -> Iterator[Point]:
    for count, row in enumerate(rows, start=1):
        value = number(row.get(name))
        if value is not None:
            at = number(row.get(clock)) or float(count)
            shown = quantity(value * factor, "%") if factor != 1 else quantity(value)
            yield Point(at, value * factor, f"{clock} {at:g}: {shown}\n{_spelled(name)}")


def _trade(point: Mapping[str, Any], name: str, unit: str) -> Point:
    share = number(point.get("share"))
    tip = f"{quantity(point['cost'], unit)}{'' if share is None else f', {percent(share)} of dense'}"
    tip += f"\n{name} {quantity(point[name])}"
    return Point(float(point["cost"]), float(point[name]), tip, chosen=bool(point.get("chosen")))


def _trade_table(points: Sequence[Mapping[str, Any]], said: str, name: str, unit: str) -> Markup:
    columns = (Column(said, True), Column("of dense", True), Column(f"{name}", True), Column(""))
    rows = [
        [
            Cell(quantity(point["cost"], unit)),
            Cell(percent(point.get("share"))),
            Cell(quantity(point[name])),
            Cell("chosen" if point.get("chosen") else ""),
        ]
        for point in points
    ]
    return table("Networks for other budgets", columns, rows)


def _of(point: Mapping[str, Any], name: str) -> float | None:
    return number(point.get(name))


def _foretold(point: Mapping[str, Any], unit: str) -> Point:
    tip = f"{word(point, 'name')}\npredicted {quantity(point['predicted'], unit, point.get('error'))}"
    tip += f"\nmeasured {quantity(point['measured'], unit, point.get('measured_error'))}"
    across, up = _of(point, "error") or 0.0, _of(point, "measured_error") or 0.0
    return Point(float(point["predicted"]), float(point["measured"]), tip, x_error=across, y_error=up)


def _foretold_table(points: Sequence[Mapping[str, Any]], unit: str) -> Markup:
    columns = (
        Column("network", heads=True),
        Column("predicted", True),
        Column("measured", True),
        Column("off by", True),
    )
    rows = []
    for point in points:
        off = float(point["predicted"]) / float(point["measured"]) - 1 if point["measured"] else None
        predicted = Cell(quantity(point["predicted"], unit, point.get("error")))
        measured = Cell(quantity(point["measured"], unit, point.get("measured_error")))
        rows.append([Cell(word(point, "name")), predicted, measured, Cell(percent(off))])
    return table("Predicted and measured", columns, rows)


def _kept_to(found: Mapping[str, Any]) -> str:
    said = []
    for row in rows_of(found, "budgets"):
        unit = word(row, "unit")
        name = _SAID.get(str(row.get("name")), str(row.get("name") or "cost"))
        remains = f", {percent(row['remains'])} of dense" if number(row.get("remains")) is not None else ""
        cost, budget = quantity(row.get("cost"), unit), quantity(row.get("budget"), unit)
        said.append(f"The plan's {name}: {cost} of {budget} allowed{remains}.")
    return " ".join(said)
