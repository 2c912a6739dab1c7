from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import inf, log

import numpy as np
import pytest
import torch
from torch import nn

import haloc
from haloc.errors import BudgetError
from haloc.forms import Dense, Form, Svd, ranks
from haloc.methods.budget import Limit, limits_of
from haloc.methods.evidence import Evidence
from haloc.methods.prices import PriceList
from haloc.methods.solve import check_reachable, grown, least_largest, least_sum
from haloc.plan import Plan
from haloc.space import rank_space

LAYERS, FORMS = 6, 5
#: All 5⁶ networks, one in a column.
ALL = np.indices((FORMS,) * LAYERS).reshape(LAYERS, -1)
NAMES = [f"layer{number}" for number in range(LAYERS)]


@dataclass(frozen=True)
class Instance:
    """Losses (layers, forms), prices (limits, layers, forms), and what the rest costs per limit."""

    losses: np.ndarray
    prices: np.ndarray
    rest: np.ndarray

    @property
    def by_name(self) -> dict[str, list[float]]:
        return dict(zip(NAMES, self.losses.tolist(), strict=True))

    def limits(self, *budgets: float) -> tuple[Limit, ...]:
        return tuple(map(self._limit, range(len(budgets)), budgets))

    def _limit(self, number: int, budget: float) -> Limit:
        forms: tuple[Form, ...] = tuple(Svd(rank) for rank in range(1, FORMS + 1))
        prices = dict(zip(NAMES, map(tuple, self.prices[number].tolist()), strict=True))
        rest = self.rest[number].item()
        dense = rest + sum(row[-1] for row in prices.values())
        return Limit(PriceList(f"cost{number}", "", dict.fromkeys(NAMES, forms), prices, rest, dense), budget)

    def all_costs(self) -> np.ndarray:
        """What every network costs, (limits, networks)."""
        return np.array([rest + added(prices) for rest, prices in zip(self.rest, self.prices, strict=True)])

    def cost(self, plan: Plan) -> np.ndarray:
        return np.array([limit.prices.cost_of(plan) for limit in self.limits(*self.rest)])

    def loss(self, plan: Plan) -> list[float]:
        return [self.losses[layer, plan[name].rank - 1] for layer, name in enumerate(NAMES)]


def added(rows: np.ndarray) -> np.ndarray:
    """The sum over the layers, for every network."""
    return sum(rows[layer][ALL[layer]] for layer in range(LAYERS))


def instance(seed: int, limits: int = 1, whole: bool = True, infinite: float = 0.15) -> Instance:
    """Random losses, some of them infinite; prices are whole numbers, or of any size and sign."""
    draw = np.random.default_rng(seed)
    losses = draw.exponential(size=(LAYERS, FORMS)) ** 2
    losses[draw.random(losses.shape) < infinite] = inf
    losses[np.arange(LAYERS), draw.integers(FORMS, size=LAYERS)] = draw.random(LAYERS)  # at least one is finite
    shape = (limits, LAYERS, FORMS)
    if whole:
        return Instance(losses, draw.integers(1, 10**6, size=shape), draw.integers(10**6, size=limits))
    return Instance(losses, draw.normal(size=shape) * 10.0 ** draw.integers(-6, 6), draw.random(limits))


def budgets(task: Instance, seed: int) -> tuple[float, ...]:
    """What some network with finite losses costs, so that it can be met."""
    allowed = np.flatnonzero(np.isfinite(added(task.losses)))
    costs = task.all_costs()[:, allowed]
    # Near the cheap end, where a budget binds; the same network for all limits, so that all can be met together.
    cheap = np.argsort((costs / np.abs(costs).max(axis=1, keepdims=True)).sum(axis=0))
    network = cheap[int(len(cheap) * np.random.default_rng(seed).random() ** 3)]
    return tuple(costs[:, network].tolist())


def best_sum(task: Instance, *limits: float) -> float:
    fits = (task.all_costs() <= np.array(limits)[:, None]).all(axis=0)
    return added(task.losses)[fits].min()


def levels(task: Instance) -> np.ndarray:
    """The largest loss of every network."""
    return np.max([task.losses[layer][ALL[layer]] for layer in range(LAYERS)], axis=0)


@pytest.mark.parametrize("seed", range(200))
def test_the_least_sum_is_that_of_brute_force(seed):
    limits = 1 + seed % 3
    task = instance(seed, limits, whole=seed % 2 == 0)
    wanted = budgets(task, seed)
    if seed % 2:  # a hair more than that network: sums of floats hang on their order
        wanted = tuple(budget + 1e-9 * max(1.0, abs(budget)) for budget in wanted)
    plan = least_sum(task.by_name, task.limits(*wanted))
    assert (task.cost(plan) <= np.array(wanted)).all()
    assert sum(task.loss(plan)) == pytest.approx(best_sum(task, *wanted), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_the_least_largest_is_that_of_brute_force_and_the_most_even_at_its_level(seed):
    task = instance(seed, 1 + seed % 3)
    wanted = budgets(task, seed)
    plan = least_largest(task.by_name, task.limits(*wanted))
    costs, largest = task.all_costs(), levels(task)
    fits = (costs <= np.array(wanted)[:, None]).all(axis=0)
    assert (task.cost(plan) <= np.array(wanted)).all()
    assert max(task.loss(plan)) == largest[fits].min()
    level = fits & (largest == max(task.loss(plan)))
    powers = (task.losses / largest[fits].min()) ** 8
    assert sum((np.array(task.loss(plan)) / largest[fits].min()) ** 8) == pytest.approx(added(powers)[level].min())


@pytest.mark.parametrize("seed", range(10))
def test_the_best_of_every_layer_is_taken_where_it_fits(seed):
    task = instance(seed, 2)
    plan = least_sum(task.by_name, task.limits(*task.all_costs().max(axis=1)))
    assert task.loss(plan) == task.losses.min(axis=1).tolist()


@pytest.mark.parametrize("solve", [least_sum, least_largest])
@pytest.mark.parametrize("seed", range(20))
def test_a_budget_that_exactly_one_network_meets_is_met_and_one_less_is_not(seed, solve):
    task = instance(seed, infinite=0)
    costs = task.all_costs()[0]
    cheapest = costs.min().item()
    plan = solve(task.by_name, task.limits(cheapest))
    assert task.cost(plan) == cheapest
    with pytest.raises(BudgetError) as caught:
        solve(task.by_name, task.limits(cheapest - 1))
    assert caught.value.reachable == {"cost0": cheapest}


@pytest.mark.parametrize("scale", [1, 10**5, 10**9])
@pytest.mark.parametrize("seed", range(3))
def test_whole_numbers_are_kept_to_the_last_unit(seed, scale):
    """Losses that fall with the price: the best network has the very cost that is asked for, and it is far up."""
    task = instance(seed, infinite=0)
    task = Instance(-task.prices[0].astype(float), task.prices * scale + np.arange(FORMS), task.rest)
    costs = np.unique(task.all_costs()[0])
    budget = costs[len(costs) // 3].item()
    plan = least_sum(task.by_name, task.limits(budget))
    assert task.cost(plan)[0] <= budget
    assert sum(task.loss(plan)) == best_sum(task, budget)


@pytest.mark.parametrize("solve", [least_sum, least_largest])
@pytest.mark.parametrize("seed", range(10))
def test_what_cannot_be_reached_is_refused_with_the_nearest_there_is(seed, solve):
    task = instance(seed)
    allowed = np.isfinite(added(task.losses))
    nearest = task.all_costs()[0][allowed].min().item()
    for share in (0.999999, 0.5, 0.01):
        with pytest.raises(BudgetError, match=r"cannot be reached: the nearest that is on offer has cost0") as caught:
            solve(task.by_name, task.limits(share * nearest))
        assert caught.value.reachable == {"cost0": nearest}


@pytest.mark.parametrize("solve", [least_sum, least_largest])
def test_the_nearest_is_the_cheapest_to_the_last_unit(solve):
    """Candidates whose prices differ by a ten-millionth of the budget."""
    draw = np.random.default_rng(0)
    prices = 10**8 + draw.integers(0, 100, size=(1, LAYERS, FORMS))
    task = Instance(draw.random((LAYERS, FORMS)), prices, np.array([0]))
    cheapest = task.all_costs().min().item()
    with pytest.raises(BudgetError) as caught:
        solve(task.by_name, task.limits(cheapest - 1))
    assert caught.value.reachable == {"cost0": cheapest}


@pytest.mark.parametrize("seed", range(4))
def test_limits_that_can_be_met_alone_but_not_together_are_refused(seed):
    draw = np.random.default_rng(seed)
    prices = draw.integers(1, 1000, size=(LAYERS, FORMS))
    # What costs little of the one costs much of the other.
    task = Instance(draw.random((LAYERS, FORMS)), np.array([prices, 1000 - prices]), np.array([5, 7]))
    costs = task.all_costs()
    wanted = tuple((costs.min(axis=1) * 1.05).tolist())
    for number, budget in enumerate(wanted):
        alone = Instance(task.losses, task.prices[number : number + 1], task.rest[number : number + 1])
        assert alone.cost(least_sum(alone.by_name, alone.limits(budget))) <= budget
    for solve in (least_sum, least_largest):
        with pytest.raises(BudgetError, match="budgets of .* for cost0 and .* for cost1 cannot be reached") as caught:
            solve(task.by_name, task.limits(*wanted))
        over = max(cost / budget for cost, budget in zip(caught.value.reachable.values(), wanted, strict=True))
        assert over == pytest.approx((costs / np.array(wanted)[:, None]).max(axis=0).min(), rel=1e-6)
    with pytest.raises(BudgetError):
        check_reachable(task.limits(*wanted))


def test_what_is_left_is_not_needed_for_reaching():
    task = instance(3)
    check_reachable(task.limits(task.all_costs().min()))
    with pytest.raises(BudgetError) as caught:
        check_reachable(task.limits(task.all_costs().min() - 1))
    assert caught.value.reachable == {"cost0": task.all_costs().min()}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layers", [[2], range(LAYERS)])
def test_a_layer_without_a_finite_loss_cannot_be_chosen_for(layers):
    task = instance(0, infinite=0)
    task.losses[layers] = inf
    for solve in (least_sum, least_largest):
        with pytest.raises(BudgetError):
            solve(task.by_name, task.limits(task.all_costs().max()))


@pytest.mark.parametrize("solve", [least_sum, least_largest])
def test_the_same_question_has_the_same_answer(solve):
    task = instance(1, 2)
    task.losses[:] = np.where(np.isfinite(task.losses), 1.0, inf)  # every network is as good as every other
    limits = task.limits(*budgets(task, 1))
    assert len({solve(task.by_name, limits) for _ in range(5)}) == 1


def test_forms_of_one_price_go_by_their_loss():
    prices = np.full((1, LAYERS, FORMS), 7)
    losses = np.tile([0.5, 0.4, 0.1, 0.2, 0.3], (LAYERS, 1))
    losses[0] = [9, 9, 9, 9, 8]  # one layer lifts the level, so that everything is allowed to the others
    task = Instance(losses, prices, np.array([0]))
    for solve in (least_sum, least_largest):
        plan = solve(task.by_name, task.limits(42))
        assert task.loss(plan) == [8, *[0.1] * 5]


@pytest.mark.parametrize("seed", range(3))
def test_networks_of_many_equal_layers_take_no_time(seed):
    """54 layers in 6 kinds, 40 forms each: a ResNet-50's worth."""
    draw = np.random.default_rng(seed)
    ranks = np.arange(1, 41)
    forms = tuple(Svd(int(rank)) for rank in ranks)
    kinds = [(draw.exponential() * ranks[::-1] ** draw.uniform(1, 2), draw.integers(1, 50) * ranks) for _ in range(6)]
    names = [f"layer{number}" for number in range(54)]
    losses = {name: kinds[number % 6][0].tolist() for number, name in enumerate(names)}
    prices = {name: tuple(kinds[number % 6][1].tolist()) for number, name in enumerate(names)}
    dense = sum(row[-1] for row in prices.values())
    budget = round(0.4 * dense)
    plan = least_sum(losses, (Limit(PriceList("macs", "", dict.fromkeys(names, forms), prices, 0, dense), budget),))
    cost = sum(prices[name][form.rank - 1] for name, form in plan.items())
    assert 0.99 * budget < cost <= budget


def _has_all_of(form, other):
    return type(form) is type(other) and all(a >= b for a, b in zip(ranks(form), ranks(other), strict=True))


def _grown_by_brute_force(plan, limits):
    """The largest sum of the ranks' logarithms among the networks that have all that the plan has."""
    offers = limits[0].prices.forms
    larger = [[form for form in row if _has_all_of(form, plan[name])] for name, row in offers.items()]
    networks = [Plan(dict(zip(offers, forms, strict=True))) for forms in product(*larger)]
    fits = [network for network in networks if all(limit.holds(network) for limit in limits)]
    return max(sum(log(rank) for form in network.values() for rank in ranks(form)) for network in fits)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_what_is_left_of_a_budget_goes_to_larger_ranks(share):
    model = nn.Sequential(nn.Conv2d(4, 12, 3), nn.Conv2d(12, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 6))
    space = rank_space(haloc.inspect(model, torch.zeros(1, 4, 8, 8)), round_to=2)
    limits = limits_of(space, {"macs": share, "params": share})
    # As probabilities of a search may be: it likes the smallest ranks, though the budget has room for more.
    liked = {
        name: [100 if form == Dense() else sum(ranks(form)) for form in row] for name, row in space.open_layers.items()
    }
    losses = {name: [float(loss) for loss in row] for name, row in liked.items()}
    plan = least_sum(losses, limits)
    larger = grown(plan, limits)
    assert all(limit.holds(larger) for limit in limits)
    assert sum(limit.prices.cost_of(larger) > limit.prices.cost_of(plan) for limit in limits)
    assert all(_has_all_of(larger[name], plan[name]) for name in plan)
    found = sum(log(rank) for form in larger.values() for rank in ranks(form))
    assert found == pytest.approx(_grown_by_brute_force(plan, limits))
    assert grown(larger, limits) == larger
    evidence = Evidence("haloc", space, losses, "likeliest")
    assert evidence.plan(limits) == larger
    assert Evidence.from_dict(evidence.to_dict()).plan(limits) == larger
