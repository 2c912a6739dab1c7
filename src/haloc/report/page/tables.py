"""Tables that scroll inside their own box and, with a script running, sort by any column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from haloc.report.page.markup import Markup, tag


@dataclass(frozen=True)
class Cell:
    """What stands in a table.

    Attributes:
        shown: Text, or markup.
        value: What it is sorted by; the text where it is None.
        share: How long the bar under it is, as a share of the cell.
        note: A second, smaller line.
    """

    shown: Any
    value: float | str | None = None
    share: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: Its heading.
        numeric: Whether it stands to the right.
        heads: Whether its cells name their rows.
        code: Whether its text is code.
        wraps: Whether its text may take several lines.
    """

    title: str
    numeric: bool = False
    heads: bool = False
    code: bool = False
    wraps: bool = False


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, sortable: bool = False) -> Markup:
    """A table in a box of its own; columns without anything in them are left out."""
    kept = [n for n in range(len(columns)) if any(str(row[n].shown) not in ("", "–") for row in rows)]
    head = tag("tr", *[_head(columns[n]) for n in kept])
    body = [tag("tr", *[_cell(columns[n], row[n]) for n in kept]) for row in rows]
    drawn = tag(
        "table",
        tag("caption", caption),
        tag("thead", head),
        tag("tbody", *body),
        class_="sortable" if sortable else None,
    )
    return tag("div", drawn, class_="wide", tabindex=0, role="region", aria_label=caption)


def _head(column: Column) -> Markup:
    return tag("th", column.title, scope="col", class_=_classes(column))


def _cell(column: Column, cell: Cell) -> Markup:
    style = None if cell.share is None else f"--w:{min(1.0, max(0.0, cell.share)) * 100:.1f}%"
    shown = tag("span", cell.shown, class_="micro", style=style) if style else cell.shown
    note = tag("small", cell.note) if cell.note else ""
    kind, scope = ("th", "row") if column.heads else ("td", None)
    return tag(kind, shown, note, class_=_classes(column), scope=scope, data_v=cell.value)


def _classes(column: Column) -> str | None:
    named = (("num", column.numeric), ("code", column.code), ("words", column.wraps))
    return " ".join(name for name, on in named if on) or None
