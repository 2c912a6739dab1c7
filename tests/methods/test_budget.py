from __future__ import annotations

from functools import cache
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from haloc.cost.count import Count
from haloc.cost.model import CostModel, Estimate, layers_cost
from haloc.cost.network import NetworkCost, Timing, sample_plans
from haloc.cost.predict import choose_rows, fit_predictor
from haloc.cost.table import Table
from haloc.cost.target import Target
from haloc.errors import BudgetError, CostError, SpecError
from haloc.factor.inspect import inspect
from haloc.forms import Dense, Svd
from haloc.inventory import Inventory
from haloc.methods.budget import amount, limits_of, spending
from haloc.methods.evidence import Evidence
from haloc.methods.prices import PriceList
from haloc.methods.search import search, solve
from haloc.space import RankSpace, random_plan, rank_space
from haloc.zoo import create
from tests.cost.latencies import made_up_table
from tests.methods import tiny

MS = PriceList("latency", "ms", {"a": (Dense(), Svd(1))}, {"a": (8.0, 1.0)}, 2.0, 10.0)
MACS = PriceList("macs", "", {"a": (Dense(), Svd(1))}, {"a": (80_000_000, 1)}, 20_000_000, 100_000_000)


class Twice(nn.Module):
    """A layer that is called twice, at two sizes, one that is never called, and a BatchNorm beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.again = nn.Conv2d(16, 16, 3, padding=1)
        self.idle = nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(16, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.again(self.norm(self.first(x)))
        x = self.again(nn.functional.max_pool2d(x, 2))
        return self.head(x.mean((2, 3)))


class Network(NamedTuple):
    model: nn.Module
    layers: Inventory
    space: RankSpace


FORMS = ("tucker2", "tucker2-in", "spatial", "svd")


@cache
def network(name: str) -> Network:
    torch.manual_seed(0)
    if name == "digits":
        model, image = tiny.network(), tiny.IMAGE
        return Network(model, inspect(model, image), tiny.rank_space_of(model))
    model = Twice() if name == "twice" else create(name)
    layers = inspect(model, torch.zeros(1, 3, 32, 32))
    return Network(model, layers, rank_space(layers, forms=FORMS, round_to=8 if name == "resnet20" else 4))


@cache
def cost_of(kind: str, name: str) -> CostModel | NetworkCost:
    _, layers, space = network(name)
    if kind == "table":
        return made_up_table(space.rows())
    if kind == "predictor":
        return fit_predictor(made_up_table(choose_rows(space.rows(), "90%" if name == "digits" else "40%")))
    if kind == "network":
        table = made_up_table(space.rows())
        plans = sample_plans(space, 9).values()
        timings = (Timing(plan, 0.3 + 1.05 * layers_cost(layers, plan, table).value) for plan in plans)
        return NetworkCost(layers, table, tuple(timings))
    return Count(kind, batch_size=2)


@pytest.mark.parametrize(
    ("wanted", "prices", "expected"),
    [
        ("60%", MS, 6.0), (0.6, MS, 6.0), (" 60 % ", MS, 6.0), ("100%", MS, 10.0), (1, MS, 10.0), (1.0, MS, 10.0),
        ("4 ms", MS, 4.0), ("4ms", MS, 4.0), ("0.5 ms", MS, 0.5), (".5ms", MS, 0.5), ("5e-1 ms", MS, 0.5),
        (4, MS, 4.0), (4.0, MS, 4.0), ("4", MS, 4.0), ("150%", MS, 15.0), (np.float64(0.6), MS, 6.0),
        ("12M", MACS, 12e6), ("12 M", MACS, 12e6), ("12m", MACS, 12e6), ("0.012G", MACS, 12e6), ("12000k", MACS, 12e6),
        ("12000000", MACS, 12e6), (12_000_000, MACS, 12e6), ("12%", MACS, 12e6), (0.12, MACS, 12e6),
    ],
)  # fmt: skip
def test_a_budget_can_be_written_in_many_ways(wanted, prices, expected):
    assert amount(wanted, prices) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("wanted", ["29%", "57%", "7%", "58%"])
def test_percentages_of_whole_numbers_are_not_rounded_down(wanted):
    assert amount(wanted, PriceList("macs", "", {}, {}, 100, 100)) == int(wanted.rstrip("%"))


@pytest.mark.parametrize(
    ("wanted", "prices", "said"),
    [
        ("5 s", MS, "'5 s' cannot be, latency is in ms"), ("5 us", MS, "latency is in ms"), ("5M", MS, "is in ms"),
        ("5 mJ", MS, "is in ms"), ("4 ms", MACS, "macs is a count, such as '12M'"), ("4 B", MACS, "is a count"),
        (0, MS, "above 0, got 0"), (-1, MS, "above 0, got -1"), ("0%", MS, "above 0"), (nan, MS, "above 0, got nan"),
        (inf, MS, "above 0, got inf"), ("1e999", MS, "above 0"), (0.0, MACS, "above 0"),
        ("-1", MS, "'60%'.*'4 ms'.*'12M', got '-1'"), ("abc", MS, "got 'abc'"), ("", MS, "got ''"), ("%", MS, "'%'"),
        ("ms", MS, "got 'ms'"), ("nan", MS, "got 'nan'"), ("6 0%", MS, "got '6 0%'"), ("60%%", MS, "got '60%%'"),
        ("4 ms 5", MS, "got '4 ms 5'"), ("4,5 ms", MS, "got '4,5 ms'"), (True, MS, "got True"), (None, MS, "got None"),
        ([0.6], MS, "a budget is a share"), (0.6j, MS, "a budget is a share"),
    ],
)  # fmt: skip
def test_other_budgets_are_refused_in_one_sentence(wanted, prices, said):
    with pytest.raises(SpecError, match=said) as caught:
        amount(wanted, prices)
    assert "\n" not in str(caught.value)


def test_budgets_by_name_have_their_own_prices():
    space = network("digits").space
    table = cost_of("table", "digits")
    limits = limits_of(space, {"macs": "50%", "params": 3000, "latency": "0.05 ms"}, {"latency": table})
    assert [(x.prices.quantity, x.prices.unit) for x in limits] == [("macs", ""), ("params", ""), ("latency", "ms")]
    assert [x.budget for x in limits] == [limits[0].prices.dense / 2, 3000, 0.05]
    assert limits_of(space, {"latency": "40%"}, table) == limits_of(space, "40%", table)
    assert limits_of(space, 0.4) == limits_of(space, {"macs": 0.4}) == limits_of(space, 0.4, Count("macs"))
    # What is given goes before what is counted.
    doubled = limits_of(space, {"macs": 1.0}, {"macs": Count("macs", batch_size=2)})
    assert doubled[0].budget == 2 * limits_of(space, 1.0)[0].budget


@pytest.mark.parametrize(
    ("budget", "cost", "said"),
    [
        ({}, None, "there is no budget"),
        ({"mac": "50%"}, None, "no cost for the budget of 'mac', known are macs, params.*Did you mean 'macs'"),
        ({"latency": "4 ms"}, None, "no cost for the budget of 'latency'"),
        ({"latency": "4 ms"}, Count("bytes"), "no cost for the budget of 'latency', known are .*bytes"),
        ({"macs": {"macs": 1}}, None, "a budget is a share"),
        ({"macs": "50%", "params": True}, None, "got True"),
        ("50%", {"latency": Count("macs")}, "one budget and costs of latency: say which one"),
    ],
)
def test_budgets_that_do_not_match_their_costs_are_refused(budget, cost, said):
    with pytest.raises(SpecError, match=said):
        limits_of(network("digits").space, budget, cost)


def test_an_empty_table_is_not_taken_for_none():
    with pytest.raises(CostError, match="has no row"):
        limits_of(network("digits").space, "50%", Table(Target(), (), {}))


@pytest.mark.parametrize("name", ["resnet20", "twice"])
def test_prices_add_up_to_what_the_inventory_counts(name):
    _, layers, space = network(name)
    macs, params = (PriceList.of(space, Count(quantity)) for quantity in ("macs", "params"))
    assert (macs.dense, params.dense) == (layers.macs, layers.params)
    assert (macs.cost_of({}), params.cost_of({})) == (layers.macs, layers.params)
    plans = [random_plan(space, seed) for seed in range(40)]
    assert len(set(plans)) > 10
    for plan in plans:
        assert (macs.cost_of(plan), params.cost_of(plan)) == (layers.macs_of(plan), layers.params_of(plan))
    assert macs.cheapest <= min(map(macs.cost_of, plans))


@pytest.mark.parametrize("name", ["resnet20", "twice"])
def test_prices_of_tables_add_up_over_all_calls(name):
    _, layers, space = network(name)
    prices = PriceList.of(space, cost_of("table", name))
    for seed in range(10):
        plan = random_plan(space, seed)
        assert prices.cost_of(plan) == pytest.approx(layers_cost(layers, plan, cost_of("table", name)).value)


@pytest.mark.parametrize("name", ["resnet20", "twice", "digits"])
def test_changes_of_a_networks_cost_add_up(name):
    space, cost = network(name).space, cost_of("network", name)
    prices = PriceList.of(space, cost)
    assert (prices.quantity, prices.unit, prices.dense) == ("latency", "ms", cost.of({}).value)
    for seed in range(10):
        plan = random_plan(space, seed)
        assert prices.cost_of(plan) == pytest.approx(cost.of(plan).value, rel=1e-9)


def test_what_was_spent_is_told():
    (limit,) = limits_of(network("digits").space, "50%")
    plan = {"conv2": next(iter(network("digits").space.layers["conv2"].grids[0]))}
    (row,) = spending((limit,), plan)
    assert (row.cost, row.budget, row.dense) == (limit.prices.cost_of(plan), limit.budget, limit.prices.dense)
    assert row.remains == row.cost / row.dense


class Case(NamedTuple):
    """A model, a cost, a method, and where its budget lies from the cheapest network (0) to the dense one (1)."""

    name: str
    kind: str
    method: str
    level: float


def cases(count: int = 50) -> list[Case]:
    draw = np.random.default_rng(5)
    kinds = ("macs", "params", "bytes", "activations", "table", "predictor", "network")
    methods = ("uniform", "random", "energy", "vbmf", "alds")
    picked = (
        (draw.choice(["resnet20", "twice", "digits"]), kinds[n % len(kinds)], methods[n % len(methods)], draw.random())
        for n in range(count)
    )
    # A fifth lies below what any network of the space costs; of the others most are tight.
    return [Case(str(a), b, c, round(-0.05 if d < 0.2 else (d - 0.2) ** 2, 3)) for a, b, c, d in picked]


CASES = cases()


@cache
def evidence_of(name: str, method: str) -> Evidence:
    return search(network(name).model, network(name).space, budget=1.0, method=method).evidence


def reachable(evidence: Evidence, prices: PriceList) -> float:
    """The cheapest network of the candidates that the method considers."""
    rows = zip(prices.prices.values(), evidence.losses.values(), strict=True)
    return prices.rest + sum(min(p for p, loss in zip(*row, strict=True) if loss < inf) for row in rows)


def recounted(case: Case, plan: Any) -> float:
    """The network's cost, not by way of the prices."""
    _, layers, _ = network(case.name)
    cost = cost_of(case.kind, case.name)
    if isinstance(cost, NetworkCost):
        return cost.of(plan).value
    if case.kind == "params":
        outside = network(case.name).space.outside.get("params", 0)
        shapes = sum(Count("params").price(x.shape, plan.get(x.name, Dense())).value for x in layers if x.calls)
        return outside + shapes
    if case.kind == "macs" and network(case.name).space.outside:
        return 2 * layers.macs_of(plan)
    total: Estimate = layers_cost(layers, plan, cost)
    return total.value


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_budget_is_met_or_refused_with_what_can_be_reached(case):
    model, _, space = network(case.name)
    cost = cost_of(case.kind, case.name)
    prices = PriceList.of(space, cost)
    budget = prices.cheapest + case.level * (prices.dense if case.level < 0 else prices.dense - prices.cheapest)
    wanted = f"{budget!r} {prices.unit}"
    evidence = evidence_of(case.name, case.method)
    least = reachable(evidence, prices)
    if case.level < 0:
        with pytest.raises(BudgetError) as caught:
            search(model, space, budget=wanted, cost=cost, method=case.method)
        assert caught.value.reachable == {prices.quantity: pytest.approx(prices.cheapest)}
    if budget < least:
        with pytest.raises(BudgetError) as caught:
            solve(evidence, wanted, cost)
        assert caught.value.reachable == {prices.quantity: pytest.approx(least)}
        return
    found = solve(evidence, wanted, cost)
    assert found.spending[0].cost <= budget
    assert recounted(case, found.plan) <= budget * (1 + 1e-9)


def test_enough_of_the_cases_cannot_be_reached_and_enough_can():
    below = sum(case.level < 0 for case in CASES)
    assert 5 <= below <= 25
    assert len(CASES) == 50
    assert len({(case.kind, case.method) for case in CASES}) == 35
