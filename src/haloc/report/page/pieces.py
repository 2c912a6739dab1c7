"""What sections are made of, and how values that may be missing are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from haloc.report.page.markup import Markup, tag, together

#: How forms are called, and which class gives them their colour.
FORMS = {"tucker2": "Tucker-2", "spatial": "spatial", "svd": "SVD", "narrow": "narrowed", "dense": "dense"}


def rows_of(value: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A list of mappings; empty where it is missing or null."""
    return [row for row in value.get(name) or () if isinstance(row, Mapping)]


def word(value: Mapping[str, Any], name: str) -> str:
    """A text; empty where it is missing or null."""
    found = value.get(name)
    return "" if found is None else str(found)


def part_of(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping; empty where it is missing or null."""
    found = value.get(name)
    return found if isinstance(found, Mapping) else {}


def pair_of(value: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Two values, before and after or a figure and its error; None for those that are missing."""
    found = value.get(name)
    listed = list(found) if isinstance(found, Sequence) and not isinstance(found, str) else [found]
    first, second = [*listed, None, None][:2]
    return first, second


def body(*parts: Any, lead: Any = "") -> Markup:
    """What a section says below its heading; nothing where all its parts are empty."""
    if not any(parts):
        return Markup()
    return together([tag("p", lead, class_="lead") if lead else "", *parts])


def card(title: Any, *parts: Any, note: Any = "") -> Markup:
    """A chart with its caption."""
    caption = tag("figcaption", tag("h3", title), tag("p", note) if note else "")
    return tag("figure", caption, *parts, class_="card")


def cards(*parts: Markup) -> Markup:
    """Charts side by side where there is room; nothing where there are none."""
    kept = [part for part in parts if part]
    return tag("div", *kept, class_="cards") if kept else Markup()


def facts(pairs: Mapping[str, Any]) -> Markup:
    """Names and values in two columns."""
    entries = [
        tag("div", tag("dt", str(name).replace("_", " ")), tag("dd", plain(value))) for name, value in pairs.items()
    ]
    return tag("dl", *entries, class_="facts") if entries else Markup()


def plain(value: Any) -> str:
    """A setting as people write it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {plain(x)}" for name, x in value.items()) or "–"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(plain, value)) or "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings(value: Mapping[str, Any]) -> Markup:
    """Settings, folded away until they are asked for."""
    known = {name: x for name, x in value.items() if x is not None and x != {} and x != []}
    return tag("details", tag("summary", "Settings"), facts(known)) if known else Markup()


def styled(kind: Any) -> str:
    """The class of a form's colour; kinds that nobody knows look like dense."""
    return f"f-{kind}" if kind in FORMS else "f-dense"
