from __future__ import annotations

import pytest
import torch
from torch import nn

import haloc
from haloc.cost.plans import plan_rows, plans_between, some_of
from haloc.errors import PlanError
from haloc.forms import Dense, Svd, Tucker2
from haloc.inventory import Inventory
from haloc.plan import Plan
from haloc.shapes import ConvShape, LinearShape


class Twice(nn.Module):
    """Two equal convolutions, a smaller image for a third, a layer that is called twice, and one that never is."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.third = nn.Conv2d(32, 32, 3, padding=1)
        self.linear, self.unused = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = self.third(torch.max_pool2d(self.second(self.first(x)), 2))
        return self.linear(self.linear(x.mean((2, 3))))


@pytest.fixture(scope="module")
def layers() -> Inventory:
    return haloc.inspect(Twice(), torch.randn(1, 32, 8, 8))


def conv(size: int) -> ConvShape:
    return ConvShape(32, 32, (3, 3), (size, size), (1, 1), (1, 1), (1, 1), bias=True)


def test_rows_are_those_of_the_plans_and_dense(layers):
    plans = [
        Plan({"first": Tucker2(4, 4), "linear": Svd(2), "third": Dense()}),
        Plan({"second": Tucker2(2, 2), "third": Tucker2(4, 4), "linear": Svd(2)}),
    ]
    assert plan_rows(layers, plans) == (
        (conv(8), Dense()),
        (conv(8), Tucker2(4, 4)),  # of the first layer in one plan
        (conv(8), Tucker2(2, 2)),  # of the second, which is as large, in the other
        (conv(4), Dense()),
        (conv(4), Tucker2(4, 4)),
        (LinearShape(32, 32), Dense()),
        (LinearShape(32, 32), Svd(2)),
    )
    assert plan_rows(layers, plans[:1]) == (
        (conv(8), Dense()),
        (conv(8), Tucker2(4, 4)),
        (conv(4), Dense()),
        (LinearShape(32, 32), Dense()),
        (LinearShape(32, 32), Svd(2)),
    )


def test_a_plan_that_does_not_fit_has_no_rows(layers):
    with pytest.raises(PlanError, match="layer 'first'"):
        plan_rows(layers, [Plan({"first": Tucker2(99, 4)})])


def changing(count: int, rank: int = 4) -> Plan:
    return Plan({f"layer{number}": Svd(rank) for number in range(count)} | {"head": Dense()})


def test_networks_between_go_from_few_changes_to_all_but_one():
    plan = changing(20)
    plans = plans_between([plan], 9)
    dense, *between = plans.values()
    assert list(plans)[:2] == ["dense", "between-0"]
    assert dense == Plan({})
    assert [len(each) for each in between] == [1, 4, 6, 9, 11, 14, 16, 19]
    assert all(each.items() < plan.changes().items() for each in between)
    assert plans == plans_between([plan], 9)
    assert plans != plans_between([plan], 9, seed=1)


@pytest.mark.parametrize("seed", range(5))
def test_no_plan_is_among_the_networks_between(seed):
    large, small = changing(4), Plan({"layer0": Svd(4), "layer2": Svd(4), "layer3": Dense()})
    networks = list(plans_between([large, small], 40, seed).values())
    assert len(set(networks)) == len(networks)
    for network in networks:
        assert network.changes() not in (large.changes(), small.changes())
        assert network.items() < large.changes().items()


def test_plans_take_turns():
    networks = list(plans_between([changing(10, 2), changing(10, 3)], 6).values())
    assert [set(each.values()) for each in networks[1:]] == [{Svd(2)}, {Svd(3)}, {Svd(2)}, {Svd(3)}, {Svd(2)}]
    assert [len(each) for each in networks[1:]] == [1, 1, 5, 9, 9]


@pytest.mark.parametrize(("changes", "networks"), [(0, 1), (1, 1), (2, 3), (3, 7)])
def test_there_are_no_more_networks_than_a_plan_has_parts(changes, networks):
    assert len(plans_between([changing(changes)], 9)) == networks


def test_a_single_choice_is_close_to_all():
    assert [len(each) for each in some_of("abcdef", 1)] == [5]
    assert some_of("abcdef", 0) == []
