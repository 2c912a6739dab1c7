from __future__ import annotations

from statistics import mean

from haloc.forms import SCALINGS
from haloc.space import random_plan, rank_space


def test_random_plans_spread_from_small_to_nearly_dense(resnet18):
    space = rank_space(resnet18, forms=tuple(SCALINGS), equal=False)
    plans = [random_plan(space, seed) for seed in range(60)]
    assert random_plan(space, 7) == plans[7]
    assert len(set(plans)) == 60
    assert all(form in space.layers[name] for plan in plans for name, form in plan.items())
    assert all(set(plan) == set(space.open_layers) for plan in plans)
    left = sorted(resnet18.macs_of(plan) / resnet18.macs for plan in plans)
    assert left[0] < 0.35
    assert left[-1] > 0.8
    assert 0.2 < mean(1 - len(plan.changes()) / len(plan) for plan in plans) < 0.3


def test_random_plans_leave_nothing_dense_where_that_is_not_on_offer(resnet18):
    space = rank_space(resnet18, dense=False)
    assert all(len(random_plan(space, seed).changes()) == len(space.open_layers) for seed in range(10))
