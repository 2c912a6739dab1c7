"""Redraws the figures of the paper's analysis from committed files, into ``docs/figures``.

    python benchmarks/paper_cifar10/figures.py

It needs the ``plot`` extra. The same files give the same bytes. What there are no files for is left out, with a word.
Fig. 2, the heat map, is ``docs/figures/heatmap.svg``: `haloc measure --figure` drew it (``docs/hardware.md``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bars import GOALS, HERE, SEARCHES

from haloc.cost.count import Count
from haloc.files import read_json
from haloc.forms import Dense, Form, full_ranks, ranks
from haloc.methods.evidence import Evidence
from haloc.methods.prices import PriceList
from haloc.plan import Plan
from haloc.report.search_figures import discrepancy_figure, loss_figure
from haloc.report.style import COLOURS, DENSE_COLOUR, drawing, write_figure
from haloc.space import LayerChoices, RankSpace

sys.path.insert(0, str(HERE.parent))  # where the other benchmarks keep what all share

from common import console

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OUTPUT = HERE.parents[1] / "docs" / "figures"
KINDS = {"expected": "mean of all paths", "likeliest": "likeliest network"}
#: What forms are called and their colours.
FORMS = {"tucker2": ("Tucker-2", COLOURS[0]), "spatial": ("spatial", COLOURS[1]), "svd": ("SVD", COLOURS[2])}
QUANTITIES = {"params": "parameters", "macs": "multiply-adds"}


class Point(NamedTuple):
    """What is drawn of a `haloc.factor.discrepancy.Discrepancy`."""

    difference: int
    error: float


def fig3(rows: Mapping[str, Any]) -> Figure:
    """The error over the difference of the ranks, at three numbers of weights."""
    return discrepancy_figure({name: [Point(*point) for point in row["points"]] for name, row in rows.items()})  # type: ignore[misc]


def fig4a(rows: Mapping[str, Any]) -> Figure:
    """The training loss with and without the term of the feature maps: two rows of the ablation."""
    names = {"with feature maps": "base", "without": "λ = 0"}
    return loss_figure({label: _history(rows[name]) for label, name in names.items()}, "cross_entropy")


def _history(row: Mapping[str, Any]) -> Evidence:
    """As much of a search as its loss needs."""
    return Evidence("haloc", RankSpace({}), history=row["history"])


def fig4b(evidence: Evidence, network: str) -> Figure:
    """Parameters and multiply-adds over the search, as shares of the uncompressed network."""
    goal = GOALS[network]
    with drawing() as figure:
        figure.set_size_inches(9, 3.6)
        panels = figure.subplots(1, len(QUANTITIES))
        for axes, quantity in zip(panels, QUANTITIES, strict=True):
            _shares(axes, evidence, quantity, 100 - getattr(goal, quantity))
        panels[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        figure.suptitle(f"{goal.title}: size over the search", x=0.01, ha="left", fontweight="bold", fontsize=11)
        return figure


def _shares(axes: Axes, evidence: Evidence, quantity: str, budget: float) -> None:
    """The mean over all paths, the likeliest network, and the budget; near it, where all of it happens."""
    from matplotlib.ticker import MaxNLocator

    dense = PriceList.of(evidence.space, Count(quantity)).dense
    rows = [row for row in evidence.history if f"val_expected_{quantity}" in row]
    axes.axhline(budget, color=DENSE_COLOUR, linestyle="--", label="budget")
    for (kind, label), colour in zip(KINDS.items(), COLOURS, strict=False):
        values = [100 * row[f"val_{kind}_{quantity}"] / dense for row in rows]
        axes.plot([row["epoch"] for row in rows], values, color=colour, label=label, marker="o", markersize=3)
    axes.set(xlabel="epoch", ylabel=f"{QUANTITIES[quantity]} left (%)")
    axes.margins(y=0.15)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)


def fig4c(plan: Plan, space: RankSpace, network: str) -> Figure:
    """The ranks of the plan, layer by layer, each with the full rank beside it: low ranks are too low for one scale."""
    offers = space.open_layers
    with drawing() as figure:
        figure.set_size_inches(9, 4.5)
        axes = figure.subplots()
        for place, (name, offer) in enumerate(offers.items()):
            _ranks(axes, place, plan.get(name, Dense()), offer)
        axes.set_xticks(range(len(offers)), list(offers), rotation=90, fontsize=8)
        axes.set(ylabel="rank (of Tucker-2: r(2), r(1))", xlim=(-0.7, len(offers) - 0.3))
        axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for what is written over the bars
        axes.set_title(f"{GOALS[network].title}: ranks chosen, of the full ones")
        _name_forms(axes, [plan.get(name, Dense()).name for name in offers])
        return figure


def _ranks(axes: Axes, place: int, form: Form, offer: LayerChoices) -> None:
    """The bars of one layer, that of the input before that of the output."""
    if isinstance(form, Dense):
        _write(axes, place, 0, "dense")
        return
    own, full = ranks(form)[::-1], full_ranks(offer.calls[0], form.name)[::-1]
    width = 0.8 / len(own)
    for number, (rank, most) in enumerate(zip(own, full, strict=True)):
        middle = place - 0.4 + width * (number + 0.5)
        axes.bar(middle, rank, 0.9 * width, color=FORMS[form.name][1])
        _write(axes, middle, rank, f"{rank} of {most}")


def _write(axes: Axes, x: float, y: float, text: str) -> None:
    """Upwards, from a little above a height."""
    above = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "va": "bottom"}
    axes.annotate(text, (x, y), rotation=90, fontsize=7, color=DENSE_COLOUR, **above)


def _name_forms(axes: Axes, used: Sequence[str]) -> None:
    for name, (label, colour) in FORMS.items():
        if name in used:
            axes.bar(0, 0, color=colour, label=label)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def figures_of(folder: Path) -> dict[str, Callable[[], Figure] | None]:
    """Every figure by its file's name; None where something is missing."""
    found: dict[str, Callable[[], Figure] | None] = {
        "paper_fig3.svg": partial(fig3, read_json(SEARCHES / "discrepancy.json")["rows"]),
        "paper_fig4a.svg": partial(fig4a, read_json(SEARCHES / "ablation.json")["rows"]),
    }
    for network in GOALS:
        search, plan = folder / "search" / f"{network}-haloc.json", folder / "plans" / f"{network}-haloc.json"
        evidence = Evidence.load(search) if search.is_file() else None
        chosen = Plan.load(plan) if plan.is_file() else None
        found[f"paper_fig4b_{network}.svg"] = evidence and partial(fig4b, evidence, network)
        found[f"paper_fig4c_{network}.svg"] = evidence and chosen and partial(fig4c, chosen, evidence.space, network)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE, help="where plans and searches lie")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where figures are written")
    options = parser.parse_args(arguments)
    for name, draw in figures_of(options.folder).items():
        if draw is None:
            console.print(f"{name}: [yellow]not drawn[/], the search or its plan is missing")
            continue
        write_figure(draw(), options.output / name)
        console.print(f"{name}: {(options.output / name).stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
