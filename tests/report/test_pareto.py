from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest

from haloc.cost.count import Count
from haloc.forms import Dense
from haloc.methods.evidence import Evidence
from haloc.methods.prices import PriceList
from haloc.plan import Plan
from haloc.report.pareto import loss_of, trade_off
from tests.report.test_search_figures import SPACE

MACS = Count("macs")
#: The smaller, the worse.
LOSSES = {name: (0.0, *(9 - number for number in range(len(offer) - 1))) for name, offer in SPACE.open_layers.items()}
SUM = Evidence("made up", SPACE, LOSSES)


def test_from_the_cheapest_network_to_the_dense_one():
    found = trade_off(SUM, 8, MACS)
    prices = PriceList.of(SPACE, MACS)
    assert found.points[0].cost == found.points[0].budget == prices.cheapest
    assert found.points[-1].plan.changes() == {}
    assert found.points[-1].share == 1
    assert [point.cost for point in found.points] == sorted({point.cost for point in found.points})
    losses = [point.loss for point in found.points]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 0


def test_larger_ranks_lose_nothing_of_what_spoke_for_the_smaller():
    """Of probabilities the plan spends what is left of a budget, on ranks that may be unlikely themselves."""
    liked = {
        name: (5.0, *(3.0 + number for number in range(len(offer) - 1))) for name, offer in SPACE.open_layers.items()
    }
    found = trade_off(Evidence("haloc", SPACE, liked, "likeliest"), 8, MACS)
    losses = [point.loss for point in found.points]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == losses[-1] == 3.0 * len(liked), "the likeliest are the smallest, and fit into every budget"


def test_every_network_is_there_once():
    found = trade_off(SUM, 60, MACS)
    assert len({point.plan for point in found.points}) == len(found.points) < 60


def test_what_a_method_rules_out_is_not_asked_for():
    cheapest = {
        name: min(range(len(row)), key=row.__getitem__) for name, row in PriceList.of(SPACE, MACS).prices.items()
    }
    ruled = {name: tuple(inf if n == cheapest[name] else x for n, x in enumerate(row)) for name, row in LOSSES.items()}
    found = trade_off(replace(SUM, losses=ruled), 8, MACS)
    assert found.points[0].cost == found.points[0].budget > PriceList.of(SPACE, MACS).cheapest
    assert len(found.points) > 2


def test_losses_by_the_rule():
    plan = Plan({name: list(offer)[1] for name, offer in SPACE.open_layers.items()})
    assert loss_of(SUM, plan) == sum(row[1] for row in LOSSES.values())
    assert loss_of(replace(SUM, rule="largest"), plan) == max(row[1] for row in LOSSES.values())
    assert loss_of(SUM, {}) == 0
    seen = Evidence("genetic", SPACE, rule="seen", seen=((Plan({}), 0.1), (plan, 0.7)))
    assert loss_of(seen, plan) == 0.7
    assert [point.loss for point in trade_off(seen, 5, MACS).points] == [0.7, 0.1]


def test_latencies_below_one_are_no_shares():
    class Fast(Count):
        unit = "ms"

        def price(self, shape, form):
            return replace(super().price(shape, form), value=super().price(shape, form).value * 1e-9)

    found = trade_off(SUM, 4, Fast("macs"))
    assert found.dense < 1
    assert found.points[0].budget == found.points[0].cost


def test_as_a_file(tmp_path):
    found = trade_off(SUM, 3, MACS)
    found.save(tmp_path / "pareto.json")
    value = json.loads((tmp_path / "pareto.json").read_text())
    assert (value["kind"], value["format"], value["quantity"], value["method"]) == (
        "haloc-pareto",
        1,
        "macs",
        "made up",
    )
    assert [Plan.from_dict(point["plan"]) for point in value["points"]] == [point.plan for point in found.points]
    assert value["points"][0]["share"] == pytest.approx(value["points"][0]["cost"] / value["dense"]["cost"])
    assert all(point["plan"]["layers"]["last"]["form"] in ("svd", Dense.name) for point in value["points"])
