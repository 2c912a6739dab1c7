"""Figures of a measured layer: what each rank costs, against dense."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from haloc.cost.model import Estimate
from haloc.cost.table import Table
from haloc.errors import CostError
from haloc.forms import Dense, Form, Spatial, Svd, Tucker2, full_ranks, ranks
from haloc.report.style import COLOURS, DENSE_COLOUR, check_suffix, drawing, write_figure
from haloc.shapes import LinearShape, Shape
from haloc.space import TOLERANCE, staircase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: More cells than this have no room for their numbers.
_MOST_NUMBERS = 200


def latency_figure(table: Table, shape: Shape, path: str | Path, *, tolerance: float = TOLERANCE) -> None:
    """Draws what the forms of one layer cost and writes the figure as .svg, .png or .pdf.

    Rows that fill a plane of two Tucker-2 ranks become a heat map with a border around what is faster than dense. Other
    rows become curves over the rank, with rings around the ranks that `haloc.space.staircase` keeps.

    Args:
        table: The measured rows; the quantity it prices is drawn.
        shape: The layer.
        path: Where to; the suffix decides the format.
        tolerance: See `haloc.space.staircase`.
    """
    path = Path(path)
    check_suffix(path)
    prices = _prices(table, shape)
    with drawing() as figure:
        axes = figure.subplots()
        plane = {ranks(form): price for form, price in prices.items() if isinstance(form, Tucker2)}
        lines = _lines(shape, prices)
        if _fills_a_plane(plane) or not lines:
            _heat_map(figure, axes, plane, prices[Dense()], table)
        else:
            _curves(axes, lines, prices[Dense()], table, tolerance)
        axes.set_title(f"{_describe(shape)}\n{table.target}")
        write_figure(figure, path)


def _prices(table: Table, shape: Shape) -> dict[Form, Estimate]:
    """What there is to draw; dense has to be among it."""
    prices = {form: table.price(shape, form) for form in table.forms_of(shape)}
    if Dense() not in prices or len(prices) == 1:
        found = ", ".join(map(str, prices)) or "none at all"
        raise CostError(
            f"a figure of {_describe(shape)} needs rows of dense and of other forms, but the table for {table.target} "
            f"has {found}; measure the layer first"
        )
    return prices


def _fills_a_plane(plane: Mapping[tuple[int, ...], Estimate]) -> bool:
    """Whether settings of two ranks cover most of a grid, rather than lie on a few lines."""
    outs, ins = {out for out, _ in plane}, {into for _, into in plane}
    return min(len(outs), len(ins)) > 1 and len(plane) > len(outs) * len(ins) / 2


def _heat_map(
    figure: Figure, axes: Axes, plane: Mapping[tuple[int, ...], Estimate], dense: Estimate, table: Table
) -> None:
    """Colour is the price; a line runs around the settings below that of dense."""
    outs, ins = sorted({out for out, _ in plane}), sorted({into for _, into in plane})
    values = np.full((len(outs), len(ins)), np.nan)
    for (out, into), price in plane.items():
        values[outs.index(out), ins.index(into)] = price.value
    lowest, highest = min(dense.value, np.nanmin(values)), max(dense.value, np.nanmax(values))
    image = axes.imshow(values, origin="lower", cmap="viridis", vmin=lowest, vmax=highest, aspect="auto")
    axes.set(xlabel="rank of the input, r(2)", ylabel="rank of the output, r(1)")
    _label_ranks(axes, ins, outs)
    if values.size <= _MOST_NUMBERS:
        _annotate(axes, values, (lowest + highest) / 2)
    _surround(axes, values < dense.value)
    bar = figure.colorbar(image, ax=axes, label=f"{table.quantity} ({table.unit})", pad=0.02)
    bar.ax.axhline(dense.value, color="white", linewidth=4)
    bar.ax.axhline(dense.value, color="#D62728", linewidth=2)
    bar.ax.text(-0.25, dense.value, "dense", color="#D62728", ha="right", va="center", fontsize=9)


def _label_ranks(axes: Axes, ins: list[int], outs: list[int]) -> None:
    """Ranks as labels, at most about a dozen on either axis."""
    for axis, labels in ((axes.xaxis, ins), (axes.yaxis, outs)):
        every = -(-len(labels) // 16)
        axis.set_ticks(range(0, len(labels), every), [str(label) for label in labels[::every]])


def _annotate(axes: Axes, values: Any, middle: float) -> None:
    size = 8 if values.shape[1] <= 8 else 6.5
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "white" if value < middle else "black"
            axes.text(column, row, f"{value:.3g}", ha="center", va="center", color=colour, fontsize=size)


def _surround(axes: Axes, inside: Any) -> None:
    """Draws the border between cells that are inside and cells that are not."""
    for row, column in np.argwhere(inside[:, 1:] != inside[:, :-1]):
        axes.plot([column + 0.5] * 2, [row - 0.5, row + 0.5], color="#D62728", linewidth=2.5)
    for row, column in np.argwhere(inside[1:] != inside[:-1]):
        axes.plot([column - 0.5, column + 0.5], [row + 0.5] * 2, color="#D62728", linewidth=2.5)


def _lines(shape: Shape, prices: Mapping[Form, Estimate]) -> dict[str, dict[int, Estimate]]:
    """The rows by the curve that they lie on, each with the one rank that changes along it."""
    lines: dict[str, dict[int, Estimate]] = {}
    for form in sorted(prices, key=ranks):
        line = _line_of(shape, form)
        if line is not None:
            name, rank = line
            lines.setdefault(name, {})[rank] = prices[form]
    return dict(sorted(lines.items()))


def _line_of(shape: Shape, form: Form) -> tuple[str, int] | None:
    match form:
        case Svd(rank):
            return "SVD", rank
        case Spatial(rank):
            return "spatial", rank
        case Tucker2(rank_out, rank_in) if rank_out == rank_in:
            return "Tucker-2, equal ranks", rank_out
        case Tucker2(rank_out, rank_in) if rank_in == full_ranks(shape, form.name)[1]:
            return "Tucker-2, output only", rank_out
        case Tucker2(rank_out, rank_in) if rank_out == full_ranks(shape, form.name)[0]:
            return "Tucker-2, input only", rank_in
    return None


def _curves(
    axes: Axes, lines: Mapping[str, Mapping[int, Estimate]], dense: Estimate, table: Table, tolerance: float
) -> None:
    """Price over rank with its range, the dense price across, rings around the edges of the staircase."""
    axes.axhspan(dense.value - dense.error, dense.value + dense.error, color=DENSE_COLOUR, alpha=0.15, linewidth=0)
    axes.axhline(dense.value, color=DENSE_COLOUR, linestyle="--", label="dense")
    for (name, prices), colour in zip(lines.items(), COLOURS, strict=False):
        values = {rank: price.value for rank, price in prices.items()}
        errors = [price.error for price in prices.values()]
        axes.errorbar(
            list(values), list(values.values()), yerr=errors, color=colour, label=name,
            marker="o", markersize=4, linewidth=1.4, capsize=2, elinewidth=1,
        )  # fmt: skip
        kept = staircase(values, dense.value, tolerance)
        axes.plot(
            kept, [values[rank] for rank in kept], linestyle="none", marker="o", markersize=10, markerfacecolor="none",
            markeredgecolor=colour, markeredgewidth=1.5,
        )  # fmt: skip
    axes.plot(
        [], [], linestyle="none", marker="o", markersize=10, markerfacecolor="none", markeredgecolor="black",
        label=f"kept, over {tolerance:.0%} cheaper",
    )  # fmt: skip
    axes.set(xlabel="rank", ylabel=f"{table.quantity} ({table.unit})", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[2:] + handles[:2], labels[2:] + labels[:2])  # the curves first


def _describe(shape: Shape) -> str:
    if isinstance(shape, LinearShape):
        places = f", {shape.positions} positions" if shape.positions > 1 else ""
        return f"linear layer {shape.in_features}→{shape.out_features}{places}"
    kernel, size = ("×".join(map(str, extents)) for extents in (shape.kernel, shape.input_size))
    steps = "×".join(map(str, dict.fromkeys(shape.stride)))
    stride = f", stride {steps}" if max(shape.stride) > 1 else ""
    groups = f", {shape.groups} groups" if shape.groups > 1 else ""
    return f"{kernel} convolution {shape.in_channels}→{shape.out_channels} of {size}{stride}{groups}"
