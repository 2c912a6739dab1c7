"""The verdict: was the budget met, and what became of score, latency, size and energy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from haloc.report.page.bars import bullet, is_over
from haloc.report.page.markup import Markup, tag, together
from haloc.report.page.numbers import number, percent, quantity, signed, times
from haloc.report.page.pieces import part_of, rows_of, word

_SIGNS = {"met": "M9 17.5l5.5 5.5L24 11.5", "missed": "M10.5 10.5l12 12M22.5 10.5l-12 12", "none": "M9 16.5h15"}
_WORDS = {"met": "Budget met", "missed": "Budget not met", "none": "No budget was set"}


def verdict(report: Mapping[str, Any]) -> Markup:
    """Sign and sentence, the budgets one by one, then a card for every figure."""
    found, figures = part_of(report, "verdict"), rows_of(report, "figures")
    how = outcome(found)
    head = [tag("h2", _sign(how), _WORDS[how]), tag("p", word(found, "text"), class_="big")]
    budgets = [_budget(row) for row in rows_of(found, "budgets")]
    listed = tag("ul", *budgets, class_="budgets") if budgets else ""
    shown = tag("div", *map(_figure, figures), class_="figures") if figures else ""
    return tag("section", tag("div", *head, listed, class_=f"hero {how}"), shown, _notes(report), id="verdict")


def outcome(found: Mapping[str, Any]) -> str:
    """Met, missed, or none where nobody asked for anything."""
    if found.get("met") is None or (found["met"] and not rows_of(found, "budgets")):
        return "none"
    return "met" if found["met"] else "missed"


def change(figure: Mapping[str, Any]) -> str:
    """What became of a figure, both ways: what remains and what is saved, or how many points it lost."""
    before, after = number(figure.get("before")), number(figure.get("after"))
    if before is None or after is None:
        return ""
    if figure.get("unit") == "%":
        return f"{signed(after - before, 2)} points"
    if figure.get("better") == "higher" or before <= 0:
        return signed(after - before, 4)
    remains = number(figure.get("remains")) or after / before
    saved = f"{percent(1 - remains)} saved" if remains <= 1 else f"{percent(remains - 1)} more"
    speed = f", {times(before / after)} as fast" if figure.get("key") == "latency" and after > 0 else ""
    return f"{percent(remains)} remain, {saved}{speed}"


def _sign(how: str) -> Markup:
    drawn = [tag("circle", cx=16.5, cy=16.5, r=15), tag("path", d=_SIGNS[how])]
    return tag("svg", *drawn, class_="sign", viewBox="0 0 33 33", aria_hidden="true")


def _budget(row: Mapping[str, Any]) -> Markup:
    unit, met = word(row, "unit"), row.get("met")
    said = f"{quantity(row.get('after'), unit)} of {quantity(row.get('budget'), unit)} allowed"
    how = f", {row['how']}" if row.get("how") else ""
    sign = tag("b", "✓ met" if met else "✗ not met", class_="yes" if met else "no")
    return tag("li", sign, " ", tag("b", word(row, "name")), f": {said}{how}")


def _figure(figure: Mapping[str, Any]) -> Markup:
    unit = word(figure, "unit")
    before = quantity(figure.get("before"), unit, figure.get("before_error"))
    after = quantity(figure.get("after"), unit, figure.get("after_error"))
    figures = tag("p", tag("span", before, " → ", class_="dim"), tag("b", after), class_="change")
    over = tag("b", " ✗ over budget", class_="no") if is_over(figure) else ""
    said = [tag("p", change(figure), over, class_="saved"), bullet(figure), _where(figure)]
    return tag("article", tag("h3", word(figure, "name")), figures, *said, data_key=figure.get("key"))


def _where(figure: Mapping[str, Any]) -> Markup:
    return tag("p", f"on {figure['on']}", class_="on") if figure.get("on") else Markup()


def _notes(report: Mapping[str, Any]) -> Markup:
    notes = [tag("li", note) for note in report.get("notes") or () if note]
    return together([tag("ul", *notes, class_="notes")]) if notes else Markup()
