"""The report in a few lines of Markdown, fit for a comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from haloc.report.page.closing import parity_text, score_unit, speed_of
from haloc.report.page.network import measure_of, ranks_text
from haloc.report.page.numbers import NOTHING, number, percent, quantity, times, with_error
from haloc.report.page.pieces import FORMS, pair_of, part_of, rows_of, word
from haloc.report.page.verdict import change, outcome

_SIGNS = {"met": "✅ **Budget met.**", "missed": "❌ **Budget not met.**", "none": "**No budget was set.**"}
_VARIANTS = ("network", "score", "latency", "speed", "MACs", "params", "file", "largest difference to torch")


def markdown(report: Mapping[str, Any]) -> str:
    """A short summary: the verdict, before and after, the networks on the way, the changed layers, how to reproduce.

    Args:
        report: What ``report.json`` holds. Parts without data are left out.

    Returns:
        Markdown text.
    """
    parts = [_head(report), _budgets(report), _figures(report), _variants(report), _layers(report), _again(report)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    return text.encode("utf-8", "replace").decode()  # a name may have half a character in it


def _head(report: Mapping[str, Any]) -> str:
    found = part_of(report, "verdict")
    said = f"{_SIGNS[outcome(found)]} {plain_text(word(found, 'text'))}".strip()
    return f"## {plain_text(report.get('title') or 'Report')}\n\n{said}"


def _budgets(report: Mapping[str, Any]) -> str:
    lines = []
    for row in rows_of(part_of(report, "verdict"), "budgets"):
        unit = word(row, "unit")
        said = f"{quantity(row.get('after'), unit)} of {quantity(row.get('budget'), unit)} allowed"
        how = f", {plain_text(row['how'])}" if row.get("how") else ""
        lines.append(f"- {plain_text(word(row, 'name'))}: {said}{how}, {'met' if row.get('met') else '**not met**'}")
    return "\n".join(lines)


def _figures(report: Mapping[str, Any]) -> str:
    rows = []
    for row in rows_of(report, "figures"):
        unit = word(row, "unit")
        before = quantity(row.get("before"), unit, row.get("before_error"))
        after = quantity(row.get("after"), unit, row.get("after_error"))
        rows.append((word(row, "name"), before, after, change(row)))
    return _table(("", "before", "after", "change"), rows)


def _variants(report: Mapping[str, Any]) -> str:
    rows = rows_of(report, "variants")
    unit = score_unit(report)
    cells = [
        (
            word(row, "name"),
            quantity(row.get("score"), unit),
            with_error(row.get("latency_ms"), "ms") + (f" ({row['latency_on']})" if row.get("latency_on") else ""),
            times(speed_of(row, rows[0])),
            *(quantity(row.get(name), "B" if name == "bytes" else "") for name in ("macs", "params", "bytes")),
            parity_text(row),
        )
        for row in rows
    ]
    return _table(_VARIANTS, cells)


def _layers(report: Mapping[str, Any]) -> str:
    """The changed layers, folded away: there may be hundreds."""
    layers = rows_of(report, "layers")
    changed = [layer for layer in layers if layer.get("form_kind") != "dense"]
    if not changed:
        return "No layer was changed." if layers else ""
    name, unit = measure_of(layers)
    head = ("layer", "shape", "form", "ranks", "latency" if unit else "MACs", "remain")
    rows = _table(head, [_layer(layer, name, unit) for layer in changed])
    said = f"{len(changed)} of {len(layers)} layers changed"
    return f"<details><summary>{said}</summary>\n\n{rows}\n\n</details>"


def _layer(layer: Mapping[str, Any], name: str, unit: str) -> tuple[Any, ...]:
    before, after = map(number, pair_of(layer, name))
    form = FORMS.get(str(layer.get("form_kind")), word(layer, "form"))
    remain = percent(after / before) if before and after is not None else NOTHING
    cost = f"{quantity(before, unit)} → {quantity(after, unit)}"
    return word(layer, "name"), word(layer, "shape"), form, ranks_text(layer), cost, remain


def _again(report: Mapping[str, Any]) -> str:
    command = word(report, "reproduce").strip()
    return f"To reproduce:\n\n{_fenced(command)}" if command else ""


def _fenced(text: str) -> str:
    """Code between fences longer than any in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table without the columns that say nothing."""
    if not rows:
        return ""
    kept = [n for n in range(len(head)) if any(str(row[n]) not in ("", NOTHING) for row in rows)]
    lines = [[head[n] for n in kept], ["---"] * len(kept)]
    lines += [[plain_text(row[n]) for n in kept] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain_text(value: Any) -> str:
    """Text that stays text in Markdown: on one line, and without signs that mean something there."""
    one_line = " ".join(str(value).split())
    return re.sub(r"([\\`*_\[\]<>|~#])", r"\\\1", one_line)
