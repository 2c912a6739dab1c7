"""The network as bars per layer, and the same as a table to sort."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from haloc.report.page.bars import bar, stack
from haloc.report.page.markup import Markup, tag
from haloc.report.page.numbers import NOTHING, grouped, like, number, percent, quantity
from haloc.report.page.pieces import FORMS, body, pair_of, rows_of, styled, word
from haloc.report.page.plots import key
from haloc.report.page.tables import Cell, Column, table

#: More layers than this scroll inside a box of their own.
_MOST_ROWS = 60
_COLUMNS = (
    Column("#", numeric=True),
    Column("layer", heads=True, code=True),
    Column("kind"),
    Column("shape"),
    Column("form"),
    Column("ranks"),
    Column("MACs before", numeric=True),
    Column("MACs after", numeric=True),
    Column("remain", numeric=True),
    Column("params before", numeric=True),
    Column("params after", numeric=True),
    Column("ms before", numeric=True),
    Column("ms after", numeric=True),
    Column("calls", numeric=True),
    Column("why", wraps=True),
)

Layer = Mapping[str, Any]


def network(report: Mapping[str, Any]) -> Markup:
    """Before and after as a whole, then a bar per layer, then the table."""
    layers = rows_of(report, "layers")
    if not layers:
        return Markup()
    name, unit = measure_of(layers)
    changed = sum(layer.get("form_kind") != "dense" for layer in layers)
    lead = f"{changed} of {len(layers)} layers are changed. "
    lead += f"The outline is a layer's {'latency' if name == 'latency_ms' else 'multiply-adds'} before, "
    lead += "the bar what remains; the percentage is its share of the new network. Totals are sums over these layers."
    longest = max((x for layer in layers for x in map(number, pair_of(layer, name)) if x is not None), default=0.0)
    whole = sum(_after(layer, name) for layer in layers)
    rows = tag("ol", *[_row(layer, name, unit, longest, whole) for layer in layers], class_="net", data_marks=True)
    long = {"class_": "tall", "tabindex": 0, "role": "region", "aria_label": "all layers"}
    shown = tag("div", rows, **long) if len(layers) > _MOST_ROWS else rows
    return body(_totals(layers, name, unit), _legend(layers), shown, _table(layers), lead=lead)


def measure_of(layers: Sequence[Layer]) -> tuple[str, str]:
    """What the bars show and its unit: latency where every layer that was changed has one, else multiply-adds."""
    priced = [layer for layer in layers if layer.get("form_kind") != "dense"] or layers
    if all(None not in map(number, pair_of(layer, "latency_ms")) for layer in priced):
        return "latency_ms", "ms"
    return "macs", ""


def ranks_text(layer: Layer) -> str:
    """Channels, where there are fewer than there were, and chosen ranks, of how many."""
    chosen, full = layer.get("ranks") or (), layer.get("full_ranks") or ()
    ranked = chosen and layer.get("form_kind") not in ("dense", "narrow")
    told = [_joined(chosen) + (f" of {_joined(full)}" if full else "")] if ranked else []
    return ", ".join([*([str(layer["width"])] if layer.get("width") else []), *told])


def _joined(ranks: Sequence[Any]) -> str:
    return "·".join(NOTHING if rank is None else str(rank) for rank in ranks)


def _after(layer: Layer, name: str) -> float:
    return number(pair_of(layer, name)[1]) or 0.0


def _kind(layer: Layer) -> str:
    return str(FORMS.get(str(layer.get("form_kind")), layer.get("form_kind") or "dense"))


def _shut(layer: Layer) -> bool:
    return layer.get("open") is False


def _style(layer: Layer) -> str:
    return "f-shut" if _shut(layer) else styled(layer.get("form_kind"))


def _legend(layers: Sequence[Layer]) -> Markup:
    counts = Counter("f-shut" if _shut(layer) else styled(layer.get("form_kind")) for layer in layers)
    names = {f"f-{kind}": name for kind, name in FORMS.items()} | {"f-dense": "kept dense", "f-shut": "left alone"}
    entries = [tag("li", key(style, 1), f"{names[style]} ({counts[style]})") for style in names if counts[style]]
    return tag("ul", *entries, class_="legend")


def _totals(layers: Sequence[Layer], name: str, unit: str) -> Markup:
    """The whole network twice, one piece per layer, so that one sees where it was and where it is."""
    pairs = [tuple(number(x) or 0.0 for x in pair_of(layer, name)) for layer in layers]
    befores, afters = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    longest = max(sum(befores), sum(afters))
    rows = []
    for said, costs, plain in (("before", befores, True), ("after", afters, False)):
        pieces = [
            (cost, "f-was" if plain else _style(layer), f"{word(layer, 'name')}\n{quantity(cost, unit)} {said}")
            for layer, cost in zip(layers, costs, strict=True)
        ]
        whole = quantity(sum(costs), unit)
        drawn = stack(pieces, longest, f"{said}: {whole} in {len(layers)} layers")
        rows += [tag("span", said), drawn, tag("b", whole)]
    return tag("div", *rows, class_="totals", data_marks=True)


def _row(layer: Layer, name: str, unit: str, longest: float, whole: float) -> Markup:
    before, after = map(number, pair_of(layer, name))
    cost = _both(before, after, unit, longest)
    share = percent(after / whole) if after is not None and whole else ""
    why = tag("p", layer["reason"], class_="why") if layer.get("reason") else ""
    parts = [
        tag("p", tag("code", word(layer, "name")), " ", tag("small", _facts(layer)), class_="who"),
        tag("p", tag("b", "left alone" if _shut(layer) else _kind(layer)), " ", ranks_text(layer), class_="what"),
        bar(before, after, longest, _style(layer), _tip(layer, cost, before, after)),
        tag("p", cost, class_="cost"),
        tag("p", share, class_="share"),
    ]
    return tag("li", *parts, why, class_="shut" if _shut(layer) else None)


def _both(before: float | None, after: float | None, unit: str, longest: float) -> str:
    """Before and after, the unit said once."""
    old, new = (like(value, unit, longest) for value in (before, after))
    return new if old == new else f"{old.removesuffix(f' {unit}') if unit else old} → {new}"


def _facts(layer: Layer) -> str:
    calls = number(layer.get("calls")) or 1
    return f"{word(layer, 'shape')}{f', called {calls:.0f} times' if calls > 1 else ''}"


def _tip(layer: Layer, cost: str, before: float | None, after: float | None) -> str:
    remain = f"{percent(after / before)} remain" if before and after is not None else ""
    macs = " → ".join(quantity(x) for x in pair_of(layer, "macs"))
    form = f"{_kind(layer)} {ranks_text(layer)}".strip()
    return "\n".join(filter(None, [word(layer, "name"), form, cost, remain, f"{macs} multiply-adds"]))


def _table(layers: Sequence[Layer]) -> Markup:
    rows = [_cells(number, layer) for number, layer in enumerate(layers, start=1)]
    drawn = table("Every layer; the headings sort", _COLUMNS, rows, sortable=True)
    return tag("details", tag("summary", "All figures of every layer, as a table"), drawn, open=len(layers) <= 30)


def _cells(place: int, layer: Layer) -> list[Cell]:
    (macs, left), (params, kept), (was, is_) = (pair_of(layer, name) for name in ("macs", "params", "latency_ms"))
    before, after = number(macs), number(left)
    remain = after / before if before and after is not None else None
    return [
        Cell(place, place),
        Cell(word(layer, "name")),
        Cell(word(layer, "kind")),
        Cell(word(layer, "shape")),
        Cell(tag("span", key(_style(layer), 1), _kind(layer), class_="form"), _kind(layer)),
        Cell(ranks_text(layer), number((layer.get("ranks") or [None])[0]) if ranks_text(layer) else ""),
        *(_count(value) for value in (macs, left)),
        Cell(percent(remain), remain),
        *(_count(value) for value in (params, kept)),
        *(Cell(quantity(value), number(value)) for value in (was, is_)),
        Cell(_calls(layer), number(layer.get("calls"))),
        Cell(word(layer, "reason")),
    ]


def _calls(layer: Layer) -> str:
    """How often a layer runs, where that is more than once."""
    return grouped(layer.get("calls")) if (number(layer.get("calls")) or 1) > 1 else NOTHING


def _count(value: Any) -> Cell:
    return Cell(quantity(value), number(value))
