from __future__ import annotations

import sys
from dataclasses import replace
from math import exp

import pytest
from torch import nn

from haloc.cost.count import Count
from haloc.errors import MissingExtraError, SpecError
from haloc.factor.discrepancy import discrepancies
from haloc.forms import Dense, Spatial, Svd, Tucker2
from haloc.methods.evidence import Evidence
from haloc.plan import Plan
from haloc.report.pareto import trade_off
from haloc.report.search_figures import (
    discrepancy_figure,
    loss_figure,
    pareto_figure,
    probabilities_figure,
    ranks_figure,
    search_figures,
    size_figure,
)
from haloc.report.style import require_matplotlib, write_figure
from haloc.shapes import LinearShape
from haloc.space import Grid, LayerChoices, RankSpace
from tests.test_shapes import conv

pytest.importorskip("matplotlib")

SMALL, LARGE = conv(in_channels=8, out_channels=16), conv(in_channels=16, out_channels=32)
NARROW = (Grid.of("tucker2", [(2, 2), (4, 4), (16, 4)]), Grid.of("spatial", [(4,), (8,)]))
WIDE = (Grid.of("tucker2", [(4, 4), (8, 8)]), Grid.of("spatial", [(8,), (16,)]))
SPACE = RankSpace(
    {
        "first": LayerChoices((SMALL,), NARROW),
        "second": LayerChoices((LARGE,), WIDE),
        "last": LayerChoices((LinearShape(32, 10),), (Grid.of("svd", [(4,), (8,)]),)),
        "closed": LayerChoices((LinearShape(4, 4),)),
    }
)
PLAN = Plan({"first": Tucker2(16, 4), "second": Spatial(8), "last": Dense()})


def evidence(epochs: int = 3, **changes) -> Evidence:
    """A search whose first candidates get likelier from epoch to epoch."""
    offers = SPACE.open_layers
    rows = []
    for epoch in range(1, epochs + 1):
        weights = {name: [exp(-epoch * number / 9) for number in range(len(offer))] for name, offer in offers.items()}
        chances = {name: [weight / sum(row) for weight in row] for name, row in weights.items()}
        sizes = {"val_expected_params": 9000 - 900 * epoch, "val_likeliest_params": 9000 - 1000 * epoch}
        rows.append(
            {"epoch": epoch, "loss": 1 / epoch, "cross_entropy": 0.5 / epoch, "probabilities": chances, **sizes}
        )
    losses = {name: tuple(range(len(offer))) for name, offer in offers.items()}
    return replace(Evidence("haloc", SPACE, losses, history=rows), **changes)


def legend_of(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def lines_of(figure) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}


def test_the_training_loss_of_several_searches():
    figure = loss_figure({"with feature maps": evidence(), "without": evidence(2)})
    assert legend_of(figure) == ["with feature maps", "without"]
    assert lines_of(figure) == {"with feature maps": [1, 1 / 2, 1 / 3], "without": [1, 1 / 2]}
    alone = loss_figure({"haloc": evidence()}, "cross_entropy")
    assert alone.axes[0].get_legend() is None
    assert "cross-entropy alone" in alone.axes[0].get_ylabel()
    assert list(alone.axes[0].lines[0].get_xdata()) == [1, 2, 3]


def test_the_size_of_the_network_over_the_search():
    figure = size_figure(evidence())
    assert legend_of(figure) == ["mean of all", "likeliest", "dense"]
    lines = lines_of(figure)
    assert lines["mean of all"] == [8100, 7200, 6300]
    assert lines["likeliest"] == [8000, 7000, 6000]
    assert lines["dense"] == [sum(offer.calls[0].params for offer in SPACE.layers.values())] * 2
    with pytest.raises(SpecError, match="no 'val_expected_latency' to draw; there are cross_entropy, epoch, loss"):
        size_figure(evidence(), "latency")


def test_the_probabilities_of_one_layer():
    figure = probabilities_figure(evidence(), "first")
    assert legend_of(figure) == ["dense", "tucker2 2/2", "tucker2 4/4", "tucker2 16/4", "spatial 4", "1 others"]
    assert lines_of(figure)["dense"] == sorted(lines_of(figure)["dense"])
    assert len(legend_of(probabilities_figure(evidence(), "last"))) == 3
    with pytest.raises(SpecError, match="nothing to choose for a layer 'frist'. Did you mean 'first'?"):
        probabilities_figure(evidence(), "frist")


def test_ranks_within_their_full_ones():
    axes = ranks_figure(PLAN, SPACE).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["first", "second", "last"]
    assert legend_of(axes.figure) == ["Tucker-2", "spatial", "dense", "full rank"]
    heights = [bar.get_height() for bar in axes.patches if bar.get_height()]
    # the input's rank before the output's, then both full ones; spatial and its full one; dense is full
    assert heights == [4, 16, 8, 16, 8, 48, 10, 10]
    assert axes.get_ylabel() == "rank (of Tucker-2: r(2), r(1))"
    assert ranks_figure({"last": Svd(4)}, SPACE).axes[0].get_ylabel() == "rank"


def test_curves_of_losses_and_of_accuracies():
    curve = trade_off(evidence(), 6, Count("macs"))
    figure = pareto_figure({"haloc": curve})
    assert lines_of(figure) == {"haloc": [point.loss for point in curve.points]}
    assert figure.axes[0].get_xlabel() == "multiply-adds left (%)"
    points = tuple(replace(point, top1=0.9 * point.share) for point in curve.points)
    judged = replace(curve, points=points, top1=0.9, images="val images of digits")
    figure = pareto_figure({"haloc": judged, "energy": judged})
    assert legend_of(figure) == ["haloc", "energy", "dense"]
    assert lines_of(figure)["dense"] == pytest.approx([90, 90])
    assert figure.axes[0].get_ylabel() == "top-1 on val images of digits (%)"
    with pytest.raises(SpecError, match="over one quantity, got macs, params"):
        pareto_figure({"a": curve, "b": trade_off(evidence(), 3, Count("params"))})


def test_the_error_over_the_difference_of_the_ranks():
    layer = nn.Conv2d(16, 24, 3)
    found = {f"{weights:,}": discrepancies(layer, weights) for weights in (600, 1200)}
    figure = discrepancy_figure(found)
    assert legend_of(figure) == ["600", "1,200"]
    assert figure.axes[0].get_legend().get_title().get_text() == "weights"
    assert lines_of(figure)["600"] == [setting.error for setting in found["600"]]


def test_all_that_a_search_has(tmp_path):
    figures = search_figures(evidence(), PLAN)
    assert set(figures) == {"loss", "parameters", "probabilities", "ranks"}
    assert "second" in figures["probabilities"].axes[0].get_title(loc="left")  # the layer with the most to gain
    assert set(search_figures(evidence(0), PLAN)) == {"ranks"}


def test_legends_cover_nothing():
    figures = [
        *search_figures(evidence(60), PLAN).values(),
        pareto_figure({"a": trade_off(evidence(), 4, Count("macs"))}),
    ]
    for figure in figures:
        figure.draw_without_rendering()
        axes = figure.axes[0]
        if axes.get_legend() is not None:
            box = axes.get_legend().get_window_extent()
            assert box.x0 >= axes.get_window_extent().x1
            assert box.x1 <= figure.bbox.x1


def test_written_whole_and_the_same_every_time(tmp_path):
    for number in range(2):
        write_figure(ranks_figure(PLAN, SPACE), tmp_path / f"{number}.svg")
    assert (tmp_path / "0.svg").read_bytes() == (tmp_path / "1.svg").read_bytes()
    write_figure(size_figure(evidence()), tmp_path / "size.png")
    assert (tmp_path / "size.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SpecError, match="written as .svg, .png, .pdf, got 'size.gif'"):
        write_figure(size_figure(evidence()), tmp_path / "size.gif")


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"haloc\[plot\]"):
        require_matplotlib()


def test_a_method_without_a_history():
    with pytest.raises(SpecError, match="the history of method 'haloc' has no 'loss' to draw; it has none at all"):
        loss_figure({"a": evidence(0)})
