"""Bars: one value against another, and many in a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from haloc.report.page.markup import Markup, tag, together
from haloc.report.page.numbers import number, quantity
from haloc.report.page.pieces import word

#: Length of a bar in its own units; the page stretches it.
LENGTH = 1000.0
#: The sheet of a bullet: its width is about what a card has, so that its text keeps its size.
_SHEET, _LEFT, _RIGHT = 320.0, 4.0, 316.0


def bullet(figure: Mapping[str, Any]) -> Markup:
    """Before as an outline, after as a bar in it, with error bars and the budget as a line."""
    values = {name: number(figure.get(name)) for name in ("before", "after", "budget")}
    known = [value for value in values.values() if value is not None]
    if not known:
        return Markup()
    low, high = min(0.0, *known), max(0.0, *known) or 1.0
    high = 100.0 if figure.get("unit") == "%" and low >= 0 and high <= 100 else high * 1.04

    def place(value: float) -> float:
        return _LEFT + (min(max(value, low), high) - low) / (high - low) * (_RIGHT - _LEFT)

    parts = [_bullet_bars(figure, values, place(0.0), place), _bullet_foot(figure, values, place)]
    tall = 40 if values["budget"] is None else 57
    attributes = {"viewBox": f"0 0 {_SHEET:g} {tall}", "role": "img", "aria_label": bullet_text(figure)}
    return tag("svg", *parts, class_="bullet", data_marks=True, **attributes)


def bullet_text(figure: Mapping[str, Any]) -> str:
    """What a bullet says, in words."""
    unit = word(figure, "unit")
    before = quantity(figure.get("before"), unit, figure.get("before_error"))
    after = quantity(figure.get("after"), unit, figure.get("after_error"))
    text = f"{word(figure, 'name')}: {before} before, {after} after"
    return text if number(figure.get("budget")) is None else f"{text}, {quantity(figure['budget'], unit)} allowed"


def _bullet_bars(figure: Mapping[str, Any], values: Mapping[str, float | None], zero: float, place: Any) -> Markup:
    parts = [tag("title", bullet_text(figure)), tag("rect", x=0, y=0, width=_SHEET, height=57.0, class_="hit")]
    for name, top, height in (("before", 8.0, 24.0), ("after", 13.0, 14.0)):
        value = values[name]
        if value is not None:
            parts.append(_box(zero, place(value), top, height, name))
            parts.append(_whisker(value, number(figure.get(f"{name}_error")), place, name))
    over = " over" if is_over(figure) else ""
    return tag("g", *parts, class_=f"m{over}")


def is_over(figure: Mapping[str, Any]) -> bool:
    """Whether a figure breaks its budget."""
    after, budget = number(figure.get("after")), number(figure.get("budget"))
    if after is None or budget is None:
        return False
    return after < budget if figure.get("better") == "higher" else after > budget


def _box(start: float, end: float, top: float, height: float, style: str) -> Markup:
    width = max(1.0, abs(end - start))
    return tag("rect", x=min(start, end), y=top, width=width, height=height, rx=2, class_=style)


def _whisker(value: float, error: float | None, place: Any, name: str) -> Markup:
    if not error:
        return Markup()
    low, high, at = place(value - error), place(value + error), 20.0
    ends = "".join(f"M{x:.1f} {at - 3:.1f}v6" for x in (low, high))
    return tag(
        "path", d=f"M{low:.1f} {at:.1f}H{high:.1f}{ends}", class_="whisker faded" if name == "before" else "whisker"
    )


def _bullet_foot(figure: Mapping[str, Any], values: Mapping[str, float | None], place: Any) -> Markup:
    """The budget's line and name; where there is none, the ends of the scale."""
    unit, budget = word(figure, "unit"), values["budget"]
    if budget is None:
        return Markup()
    at = place(budget)
    side = "end" if at > _SHEET * 0.66 else "start" if at < _SHEET * 0.33 else "mid"
    line = tag("line", x1=at, x2=at, y1=2.0, y2=38.0, class_="limit")
    return together([line, tag("text", f"budget {quantity(budget, unit)}", x=at, y=51.0, class_=side)])


def bar(before: float | None, after: float | None, longest: float, style: str, tip: str) -> Markup:
    """One bar of many: an outline for what was, filled with what remains."""
    parts = [tag("title", tip), tag("rect", x=0, y=0, width=LENGTH, height=22, class_="hit")]
    parts += [_length(before, longest, 2, 18, "was"), _length(after, longest, 4, 14, "is")]
    drawn = tag("g", *parts, class_=f"m {style}")
    return _stretched(drawn, tip)


def stack(parts: Iterable[tuple[float, str, str]], longest: float, said: str) -> Markup:
    """Pieces one after the other, each a length, a class and what is said of it."""
    drawn, start = [], 0.0
    for length, style, tip in parts:
        width = LENGTH * length / longest if longest else 0.0
        piece = tag("rect", x=start, y=1, width=max(0.0, width - 1.5), height=20, class_="is")
        drawn.append(tag("g", tag("title", tip), piece, class_=f"m {style}"))
        start += width
    return _stretched(together(drawn), said)


def _length(value: float | None, longest: float, top: int, height: int, style: str) -> Markup:
    if not value or not longest:
        return Markup()
    return tag("rect", x=0, y=top, width=max(2.0, LENGTH * value / longest), height=height, class_=style)


def _stretched(drawn: Markup, said: str) -> Markup:
    sheet = {"viewBox": f"0 0 {LENGTH:g} 22", "preserveAspectRatio": "none", "role": "img", "aria_label": said}
    return tag("svg", drawn, class_="bar", **sheet)
