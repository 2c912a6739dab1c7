"""Writing HTML and SVG: text is escaped unless it was made here."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

#: Elements that have no end tag in HTML.
_VOID = frozenset({"meta", "link", "br", "hr"})


class Markup(str):
    """Text that is markup already; any other text is escaped before it becomes part of a page."""

    __slots__ = ()


def safe(value: Any) -> Markup:
    """Markup as it is, anything else escaped; control characters, which no page may have, become a sign."""
    if isinstance(value, Markup):
        return value
    readable = "".join(sign if sign >= " " or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in str(value))
    return Markup(escape(readable.encode("utf-8", "replace").decode()))


def together(parts: Iterable[Any], between: str = "") -> Markup:
    """Parts one after the other, those that are not markup escaped."""
    return Markup(between.join(map(safe, parts)))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """One element.

    Args:
        name: What it is called.
        children: What is in it; plain text is escaped.
        attributes: Its attributes: ``class_`` is class, ``data_v`` is data-v. None and False are left out, True has no
            value.
    """
    opened = name + "".join(_attribute(*item) for item in attributes.items())
    if name in _VOID:
        return Markup(f"<{opened}>")
    return Markup(f"<{opened}>{together(children)}</{name}>")


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    spelled = name.rstrip("_").replace("_", "-")
    return f" {spelled}" if value is True else f' {spelled}="{safe(_short(value))}"'


def _short(value: Any) -> Any:
    """Coordinates with two digits after the point: nobody sees more, and files stay small."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
