"""Figures of a search: how it went, what it chose, and what a budget costs; after the paper's Fig. 3 and 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from haloc.cost.count import COUNTS, Count
from haloc.errors import SpecError, nearest
from haloc.factor.discrepancy import Discrepancy
from haloc.forms import Dense, Form, Tucker2, full_ranks, ranks
from haloc.methods.evidence import Evidence
from haloc.methods.prices import PriceList
from haloc.plan import Plan
from haloc.report.pareto import TradeOff
from haloc.report.style import COLOURS, DENSE_COLOUR, drawing
from haloc.space import LayerChoices, RankSpace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: More epochs than this have no room for a dot each.
_MOST_DOTS = 40
#: Candidates of a layer that are told apart; the others are drawn without a name.
_NAMED = 5
#: Colours of more lines than a figure of a few has.
_MORE = (*COLOURS, "#56B4E9", "#8C564B", "#7F7F00")
_SAID = {"macs": "multiply-adds", "params": "parameters"}
_FORM_COLOURS = {"tucker2": COLOURS[0], "spatial": COLOURS[1], "svd": COLOURS[2], "dense": "#BBBBBB"}
_FORM_NAMES = {"tucker2": "Tucker-2", "spatial": "spatial", "svd": "SVD", "dense": "dense"}


def search_figures(evidence: Evidence, plan: Plan) -> dict[str, Figure]:
    """All figures that there is something to draw of: loss, parameters, probabilities and ranks, by these names."""
    found = {"ranks": ranks_figure(plan, evidence.space)}
    if _epochs(evidence, "loss"):
        found["loss"] = loss_figure({evidence.method: evidence})
    if _epochs(evidence, "val_expected_params"):
        found["parameters"] = size_figure(evidence)
    if _epochs(evidence, "probabilities"):
        found["probabilities"] = probabilities_figure(evidence, _largest_layer(evidence.space))
    return found


def loss_figure(evidences: Mapping[str, Evidence], term: str = "loss") -> Figure:
    """The training loss over the epochs, one line per search: the paper's Fig. 4a, with and without feature maps.

    Args:
        evidences: The searches by the names that the legend has for them.
        term: Which figure of an epoch; "cross_entropy" compares searches whose losses have different terms.
    """
    with drawing() as figure:
        axes = figure.subplots()
        for (name, evidence), colour in zip(evidences.items(), _colours(len(evidences)), strict=True):
            found = _required(evidence, term)
            axes.plot(list(found), list(found.values()), color=colour, label=name, **_line(found))
        said = "training loss" if term == "loss" else f"training loss, {term.replace('_', '-')} alone"
        axes.set(ylabel=said, title="Training over the search")
        _over_epochs(axes)
        if len(evidences) > 1:
            _legend(axes)
        return figure


def size_figure(evidence: Evidence, quantity: str = "params") -> Figure:
    """The network's size over the search, in the mean over its probabilities and if it ended there: Fig. 4b.

    Args:
        evidence: What a search with a history found.
        quantity: "params", "macs", or the name of what was budgeted.
    """
    lines = {"expected": "mean of all", "likeliest": "likeliest"}
    with drawing() as figure:
        axes = figure.subplots()
        for (key, label), colour in zip(lines.items(), COLOURS, strict=False):
            found = _required(evidence, f"val_{key}_{quantity}")
            axes.plot(list(found), list(found.values()), color=colour, label=label, **_line(found))
        if quantity in COUNTS:
            dense = PriceList.of(evidence.space, Count(quantity)).dense
            axes.axhline(dense, color=DENSE_COLOUR, linestyle="--", label="dense")
            axes.yaxis.set_major_formatter("{x:,.0f}")
        said = _SAID.get(quantity, quantity)
        axes.set(ylabel=said, ylim=(0, None), title=f"The network's {said} over the search")
        _over_epochs(axes)
        _legend(axes)
        return figure


def probabilities_figure(evidence: Evidence, layer: str) -> Figure:
    """The selection probabilities of one layer over the search; the likeliest candidates at the end have names."""
    rows, offers = _required(evidence, "probabilities"), evidence.space.open_layers
    if layer not in offers:
        raise SpecError(f"there was nothing to choose for a layer {layer!r}.{nearest(layer, offers)}")
    lines = {str(form): [row[layer][number] for row in rows.values()] for number, form in enumerate(offers[layer])}
    named = sorted(lines, key=lambda form: lines[form][-1], reverse=True)[:_NAMED]
    others = [form for form in lines if form not in named]
    with drawing() as figure:
        axes = figure.subplots()
        for form, colour in zip(named, COLOURS, strict=False):
            axes.plot(list(rows), lines[form], color=colour, label=form, zorder=3, **_line(rows))
        for form in others:
            label = f"{len(others)} others" if form == others[0] else None
            axes.plot(list(rows), lines[form], color="#BBBBBB", linewidth=0.8, label=label)
        axes.set(ylabel="selection probability", ylim=(0, None), title=f"The candidates of {layer}")
        _over_epochs(axes)
        _legend(axes)
        return figure


def ranks_figure(plan: Mapping[str, Form], space: RankSpace) -> Figure:
    """The ranks of every open layer, the forms by colour, the full ranks as frames: Fig. 4c.

    A form of two ranks has two bars, that of the input, r(2), before that of the output, r(1).
    """
    offers = space.open_layers
    chosen = {name: plan.get(name, Dense()) for name in offers}
    with drawing() as figure:
        figure.set_size_inches(max(7.0, 2.5 + 0.28 * len(offers)), 4.5)
        axes = figure.subplots()
        for number, (name, form) in enumerate(chosen.items()):
            _bars(axes, number, form, offers[name])
        axes.set_xticks(range(len(offers)), list(offers), rotation=90, fontsize=8)
        pairs = any(isinstance(form, Tucker2) for form in chosen.values())
        axes.set(ylabel="rank" + " (of Tucker-2: r(2), r(1))" * pairs, title="Ranks chosen")
        axes.set_xlim(-0.7, len(offers) - 0.3)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        used = [name for name in _FORM_COLOURS if name in {form.name for form in chosen.values()}]
        for name in used:
            axes.bar(0, 0, color=_FORM_COLOURS[name], label=_FORM_NAMES[name])
        axes.bar(0, 0, color="none", edgecolor=DENSE_COLOUR, linewidth=0.8, label="full rank")
        _legend(axes)
        return figure


def pareto_figure(curves: Mapping[str, TradeOff]) -> Figure:
    """What is lost over what is paid, one line per curve: accuracy where it was measured, else the method's loss.

    Args:
        curves: By the names that the legend has for them, all over one quantity.
    """
    first = next(iter(curves.values()))
    if any(curve.quantity != first.quantity for curve in curves.values()):
        raise SpecError(f"curves in one figure are over one quantity, got {_quantities(curves)}")
    measured = all(point.top1 is not None for curve in curves.values() for point in curve.points)
    with drawing() as figure:
        axes = figure.subplots()
        for (name, curve), colour in zip(curves.items(), _colours(len(curves)), strict=True):
            shares = [100 * point.share for point in curve.points]
            values = [100 * (point.top1 or 0.0) if measured else point.loss for point in curve.points]
            axes.plot(shares, values, color=colour, label=name, marker="o", markersize=4, linewidth=1.4)
        if measured and first.top1 is not None:
            axes.axhline(100 * first.top1, color=DENSE_COLOUR, linestyle="--", label="dense")
        said = _SAID.get(first.quantity, first.quantity)
        lost = f"top-1 on {first.images} (%)" if measured else "loss that the method expects"
        axes.set(xlabel=f"{said} left (%)", ylabel=lost, xlim=(0, 102), title=f"Networks by their {said}")
        axes.grid(alpha=0.25)
        _legend(axes)
        return figure


def discrepancy_figure(found: Mapping[str, Sequence[Discrepancy]]) -> Figure:
    """Approximation error over the difference of the two ranks, at one number of weights per line: Fig. 3.

    Args:
        found: What `haloc.factor.discrepancy.discrepancies` returned, by the names that the legend has for them.
    """
    with drawing() as figure:
        axes = figure.subplots()
        for (name, settings), colour in zip(found.items(), _colours(len(found)), strict=True):
            differences, errors = zip(*((setting.difference, setting.error) for setting in settings), strict=True)
            axes.plot(differences, errors, color=colour, label=name, linewidth=1.4)
            best = min(settings, key=lambda setting: setting.error)
            axes.plot(best.difference, best.error, color=colour, marker="o", markersize=6)
        axes.axvline(0, color=DENSE_COLOUR, linestyle=":", linewidth=1)
        axes.set(xlabel="difference of the ranks, r(1) − r(2)", ylabel="relative error of the weight")
        axes.set_title("Error at a given number of weights; a dot marks the least")
        axes.grid(alpha=0.25)
        _legend(axes, "weights")
        return figure


def _epochs(evidence: Evidence, name: str) -> dict[int, Any]:
    """A figure of the history by epoch."""
    rows = enumerate(evidence.history, start=1)
    return {int(row.get("epoch", number)): row[name] for number, row in rows if row.get(name) is not None}


def _required(evidence: Evidence, name: str) -> dict[int, Any]:
    found = _epochs(evidence, name)
    if not found:
        known = sorted({key for row in evidence.history for key in row})
        have = f"there are {', '.join(known)}" if known else "it has none at all"
        raise SpecError(f"the history of method {evidence.method!r} has no {name!r} to draw; {have}")
    return found


def _largest_layer(space: RankSpace) -> str:
    """The open layer with the most multiply-adds."""
    offers = space.open_layers
    return max(offers, key=lambda name: sum(call.macs for call in offers[name].calls))


def _bars(axes: Axes, place: int, form: Form, offer: LayerChoices) -> None:
    """The ranks of one layer beside each other, within frames as high as the full ones."""
    family = offer.grids[0].family if isinstance(form, Dense) else form.name
    fulls = full_ranks(offer.calls[0], family)
    own = fulls if isinstance(form, Dense) else ranks(form)
    width = 0.8 / len(own)
    places = [place - 0.4 + width * (number + 0.5) for number in range(len(own))]
    axes.bar(places, own[::-1], width, color=_FORM_COLOURS[form.name])
    axes.bar(places, fulls[::-1], width, color="none", edgecolor=DENSE_COLOUR, linewidth=0.6)


def _colours(count: int) -> list[str]:
    """One per line, from the start again where there are more lines than colours."""
    return [_MORE[number % len(_MORE)] for number in range(count)]


def _line(points: Mapping[int, Any]) -> dict[str, Any]:
    """Points get dots where there is room for them."""
    return {"linewidth": 1.4, "marker": "o" if len(points) <= _MOST_DOTS else None, "markersize": 4}


def _over_epochs(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)


def _legend(axes: Axes, title: str | None = None) -> None:
    """Beside the axes, where it covers nothing."""
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), title=title)


def _quantities(curves: Mapping[str, TradeOff]) -> str:
    return ", ".join(sorted({curve.quantity for curve in curves.values()}))
