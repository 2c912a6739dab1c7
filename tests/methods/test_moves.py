"""Ranks that go from layers that can spare them to layers that want them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch import nn

import haloc
from haloc.factor.inspect import inspect
from haloc.forms import Dense, Spatial, Tucker2
from haloc.methods.budget import limits_of
from haloc.methods.moves import lost, moved, steps
from haloc.space import Grid, RankSpace
from tests.methods.tiny import IMAGE, rank_space_of, trained

OFFER = (Dense(), *(Tucker2(r, r) for r in (2, 4, 6)), Tucker2(16, 4), Tucker2(16, 6), Spatial(4), Spatial(8))


def test_steps_stay_within_a_form():
    assert steps(Tucker2(6, 6), OFFER, 2, up=False) == [Tucker2(4, 4), Tucker2(2, 2)]
    assert steps(Tucker2(2, 2), OFFER, 2, up=False) == []
    assert steps(Tucker2(16, 6), OFFER, 2, up=False) == [Tucker2(16, 4), Tucker2(4, 4)]
    assert steps(Tucker2(4, 4), OFFER, 2, up=True) == [Tucker2(6, 6), Tucker2(16, 6)]
    assert steps(Spatial(4), OFFER, 2, up=True) == [Spatial(8)]
    assert steps(Dense(), OFFER, 2, up=True) == []


def test_what_is_lost_is_what_a_smaller_rank_loses():
    model = trained().eval()
    offers = {name: tuple(offer) for name, offer in rank_space_of(model).open_layers.items()}
    plan = haloc.Plan(
        {name: max(offer, key=lambda form: sum(haloc.forms.ranks(form))) for name, offer in offers.items()}
    )
    network = haloc.apply_plan(model, plan).eval()
    x = torch.randn(8, *IMAGE.shape[1:], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, state = model(x), {name: value.clone() for name, value in network.state_dict().items()}

    def loss(net: nn.Module) -> float:
        with torch.no_grad():
            return float((net(x) - expected).square().mean())

    found = lost(network, plan, offers, loss)
    assert found, "some layer could be smaller"
    for name, row in found.items():
        smaller = steps(plan[name], offers[name], 2, up=False)
        losses = [loss(haloc.apply_plan(model, {**plan, name: form})) for form in (plan[name], *smaller)]
        wanted = [max(0.0, after - before) for before, after in pairwise(losses)]
        # The network's own factors are factorised again, which comes to the same where nothing was trained.
        assert row == pytest.approx(wanted, rel=0.05, abs=1e-4)
    assert all(torch.equal(state[name], value) for name, value in network.state_dict().items()), "left as it was"


def test_the_exchange_is_the_best_of_all_within_reach():
    model = trained().eval()
    offer = tuple(Tucker2(rank, rank) for rank in range(1, 7))
    grids = (Grid.of("tucker2", [(rank, rank) for rank in range(1, 7)]),)
    chosen = rank_space_of(model)
    space = RankSpace({name: replace(chosen.layers[name], grids=grids) for name in chosen.open_layers})
    offers = {name: (Dense(), *offer) for name in space.open_layers}
    plan = dict.fromkeys(offers, Tucker2(3, 3))
    layers = inspect(model, IMAGE)
    limits = limits_of(space, layers.macs_of(haloc.Plan(plan)) / layers.macs + 1e-6)
    less = {name: (0.1 * 3**place, 0.2 * 3**place) for place, name in enumerate(offers)}
    # A step more gains half of what a step less loses, since one less loses half of what another would.
    worth = {name: {2: row[0], 3: 0.0, 4: -row[0] / 2} for name, row in less.items()}
    near = ({name: Tucker2(r, r) for name, r in zip(offers, row, strict=True)} for row in product((2, 3, 4), repeat=3))
    fitting = [plan for plan in near if all(limit.holds(haloc.Plan(plan)) for limit in limits)]
    sums = [sum(worth[name][form.rank_in] for name, form in plan.items()) for plan in fitting]
    found = moved(plan, less, offers, limits, 1)
    assert len(fitting) > 1
    assert min(sums) < 0, "there was something to exchange"
    assert sum(worth[name][form.rank_in] for name, form in found.items()) == pytest.approx(min(sums))


def test_layers_of_which_nothing_is_known_stay():
    model = trained().eval()
    space = rank_space_of(model)
    offers = {name: tuple(offer) for name, offer in space.open_layers.items()}
    plan = {name: offer[-1] for name, offer in offers.items()}
    assert dict(moved(plan, {}, offers, limits_of(space, 1.0), 2)) == plan
