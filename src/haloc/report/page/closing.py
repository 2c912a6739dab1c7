"""The networks on the way, the exports, the time it took, and how to do it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from haloc.report.page.bars import bar
from haloc.report.page.markup import Markup, tag
from haloc.report.page.numbers import duration, number, percent, quantity, times, tiny, with_error
from haloc.report.page.pieces import body, facts, pair_of, part_of, rows_of, word
from haloc.report.page.tables import Cell, Column, table

_VARIANTS = (
    Column("network", heads=True),
    Column("score", numeric=True),
    Column("latency", numeric=True),
    Column("speed", numeric=True),
    Column("MACs", numeric=True),
    Column("params", numeric=True),
    Column("file", numeric=True),
    Column("largest difference to torch", wraps=True),
)
_EXPORTS = (
    Column("format", heads=True),
    Column("file", code=True),
    Column("size", numeric=True),
    Column("batch"),
    Column("largest difference to torch", wraps=True),
    Column("latency", numeric=True),
    Column("score", numeric=True),
)


def variants(report: Mapping[str, Any]) -> Markup:
    """A row for every network on the way, bars against the first."""
    rows = rows_of(report, "variants")
    unit = score_unit(report)
    cells = [_variant(row, rows[0], unit) for row in rows]
    drawn = table("The networks on the way; bars are what remains of the first", _VARIANTS, cells) if rows else ""
    return body(drawn)


def exports(report: Mapping[str, Any]) -> Markup:
    """What was written, and how it was checked."""
    unit = score_unit(report)
    cells = [_export(row, unit) for row in rows_of(report, "exports")]
    drawn = table("Exported files", _EXPORTS, cells) if cells else ""
    lead = "Every file was run in its own runtime and its outputs compared with the torch network's."
    return body(drawn, lead=lead)


def stages(report: Mapping[str, Any]) -> Markup:
    """How long every stage took."""
    rows = rows_of(report, "stages")
    longest = max((number(row.get("seconds")) or 0.0 for row in rows), default=0.0)
    total = sum(number(row.get("seconds")) or 0.0 for row in rows)
    drawn = tag("ol", *[_stage(row, longest) for row in rows], class_="net stages", data_marks=True) if rows else ""
    return body(drawn, lead=f"{duration(total)} in all." if rows else "")


def again(report: Mapping[str, Any]) -> Markup:
    """The command, the recipe and the surroundings."""
    command, recipe = report.get("reproduce"), report.get("recipe")
    parts = [_copied("command", command), _copied("recipe", recipe)]
    surroundings = facts(part_of(report, "environment"))
    return body(*parts, tag("h3", "Environment") if surroundings else "", surroundings)


def score_unit(report: Mapping[str, Any]) -> str:
    """The unit of the score, from the figure of it."""
    return next((word(row, "unit") for row in rows_of(report, "figures") if row.get("key") == "score"), "")


def parity_text(row: Mapping[str, Any]) -> str:
    """How far the outputs are from the torch network's, in words."""
    parity = part_of(row, "parity")
    said = [f"{tiny(parity[on])} on {on} inputs" for on in ("random", "real") if number(parity.get(on)) is not None]
    if number(parity.get("same_answer")) is not None:
        said.append(f"{percent(parity['same_answer'])} same answer")
    return ", ".join(said) or "–"


def speed_of(row: Mapping[str, Any], first: Mapping[str, Any]) -> float | None:
    """How many times as fast as the first network, where both were measured in one runtime."""
    before, after = number(pair_of(first, "latency_ms")[0]), number(pair_of(row, "latency_ms")[0])
    return before / after if before and after and row.get("latency_on") == first.get("latency_on") else None


def _share(row: Mapping[str, Any], first: Mapping[str, Any], name: str) -> float | None:
    before, after = number(pair_of(first, name)[0]), number(pair_of(row, name)[0])
    return after / before if before and after is not None else None


def _variant(row: Mapping[str, Any], first: Mapping[str, Any], unit: str) -> list[Cell]:
    speed = speed_of(row, first)
    latency = with_error(row.get("latency_ms"), "ms")
    counts = [(name, "B" if name == "bytes" else "") for name in ("macs", "params", "bytes")]
    return [
        Cell(word(row, "name")),
        Cell(quantity(row.get("score"), unit)),
        Cell(latency, share=1 / speed if speed else None, note=word(row, "latency_on")),
        Cell(times(speed)),
        *(Cell(quantity(row.get(name), unit_), share=_share(row, first, name)) for name, unit_ in counts),
        Cell(parity_text(row)),
    ]


def _export(row: Mapping[str, Any], unit: str) -> list[Cell]:
    dynamic = row.get("dynamic_batch")
    batch = "–" if dynamic is None else "any size" if dynamic else "fixed"
    return [
        Cell(word(row, "format")),
        Cell(word(row, "path")),
        Cell(quantity(row.get("bytes"), "B")),
        Cell(batch),
        Cell(parity_text(row)),
        Cell(with_error(row.get("latency_ms"), "ms")),
        Cell(quantity(row.get("score"), unit)),
    ]


def _stage(row: Mapping[str, Any], longest: float) -> Markup:
    seconds, kept = number(row.get("seconds")), bool(row.get("kept"))
    said = f"{duration(seconds)}{', kept from an earlier run' if kept else ''}"
    drawn = bar(None, seconds, longest, "f-shut" if kept else "s0", f"{word(row, 'name')}\n{said}")
    return tag("li", tag("p", word(row, "name"), class_="who"), drawn, tag("p", said, class_="cost"))


def _copied(name: str, value: Any) -> Markup:
    """Text with a button that copies it, which only shows where scripts run."""
    if not value:
        return Markup()
    button = tag("button", "Copy", type="button", hidden=True, data_copy=name, aria_label=f"copy the {name}")
    written = tag("pre", tag("code", str(value).strip("\n"), id=name), tabindex=0)
    return tag("div", tag("h3", name.capitalize()), button, written, class_="copied")
