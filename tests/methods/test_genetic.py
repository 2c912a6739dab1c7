"""Whole networks bred within the limits."""

from __future__ import annotations

from functools import cache
from math import isclose
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from haloc.cost.count import Count
from haloc.errors import BudgetError, SpecError
from haloc.factor.inspect import inspect
from haloc.factor.surgery import apply_plan
from haloc.methods.budget import limits_of
from haloc.methods.evidence import Evidence
from haloc.methods.genes import Ladders
from haloc.methods.genetic import METHOD, GeneticSettings
from haloc.methods.task import Task
from haloc.methods.trials import examples
from haloc.space import RankSpace, rank_space
from haloc.training.objective import cross_entropy
from tests.methods import tiny

SETTINGS = GeneticSettings(population=6, generations=4, images=100)


@cache
def model() -> nn.Module:
    torch.set_num_threads(1)
    return tiny.trained().eval()


@cache
def space() -> RankSpace:
    return rank_space(inspect(model(), tiny.IMAGE), forms=("tucker2", "spatial"), round_to=2, names=tiny.OPEN)


def task(budget: Any = 0.4, **options: Any) -> Task:
    train, val = tiny.batches()
    return Task(model(), space(), limits_of(space(), budget), train, val, **options)


@cache
def found() -> Evidence:
    return METHOD(task(), SETTINGS)


def told(evidence: Evidence) -> dict[str, Any]:
    return {"seen": [(plan.to_dict(), loss) for plan, loss in evidence.seen], "history": list(evidence.history)}


def test_every_network_seen_keeps_to_the_limits_and_is_there_once():
    (limit,) = task().limits
    assert all(limit.holds(plan) for plan, _ in found().seen)
    assert len({tuple(plan.items()) for plan, _ in found().seen}) == len(found().seen)
    assert len(found().seen) > SETTINGS.population


def test_nothing_more_could_be_paid_for_in_any_of_them():
    """Budgets are used up: no layer can take the next rung alone."""
    (limit,) = task().limits
    cheapest_step = min(
        min(b - a for a, b in zip(sorted(set(row)), sorted(set(row))[1:], strict=False))
        for row in limit.prices.prices.values()
    )
    costs = [limit.prices.cost_of(plan) for plan, _ in found().seen]
    assert max(limit.budget - cost for cost in costs) < 20 * cheapest_step
    assert min(costs) > 0.85 * limit.budget


def test_the_loss_is_the_cross_entropy_with_the_statistics_of_the_batch():
    plan, loss = found().seen[0]
    network = apply_plan(model(), plan)
    network.norm1.train()
    with torch.no_grad():
        losses = [(float(cross_entropy(network(x), y)), len(y)) for x, y in examples(task(), 100)]
    assert isclose(loss, sum(mean * count for mean, count in losses) / 100, rel_tol=1e-4)


def test_generations_improve_and_the_best_is_never_lost():
    best = [row["best"] for row in found().history]
    assert best == sorted(best, reverse=True)
    assert best[-1] < best[0]
    assert best[-1] == min(loss for _, loss in found().seen)


def test_the_seed_decides_everything():
    assert told(METHOD(task(), SETTINGS)) == told(found())
    other = GeneticSettings(population=6, generations=1, images=100, seed=1)
    assert told(METHOD(task(), other))["seen"][0] != told(found())["seen"][0]


def test_interrupted_and_resumed_is_as_if_nothing_had_happened(tmp_path):
    def interrupt(done: int, total: int) -> None:
        assert total == 24
        if done == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        METHOD(task(folder=tmp_path, on_step=interrupt), SETTINGS)
    assert len((tmp_path / "genetic.jsonl").read_text().splitlines()) == 3
    assert told(METHOD(task(folder=tmp_path), SETTINGS)) == told(found())
    assert told(METHOD(task(folder=tmp_path), SETTINGS)) == told(found())


def test_more_generations_go_on_from_fewer_and_other_limits_do_not(tmp_path, caplog):
    fewer = GeneticSettings(population=6, generations=2, images=100)
    METHOD(task(folder=tmp_path), fewer)
    assert told(METHOD(task(folder=tmp_path), SETTINGS)) == told(found())
    assert told(METHOD(task(folder=tmp_path), fewer))["history"] == list(found().history)[:2]
    assert not caplog.text
    METHOD(task(0.6, folder=tmp_path), fewer)
    assert "not used" in caplog.text


def test_candidates_that_cost_more_and_err_more_are_left_out():
    limits = limits_of(space(), 0.4)
    costs = limits[0].prices.prices["conv3"]
    errors = {name: [0.5] * len(row) for name, row in limits[0].prices.prices.items()}
    errors["conv3"] = [0.0 if number == 0 else 0.3 for number in range(len(costs))]
    ladders = Ladders.of(limits, errors)
    cheapest = min(range(1, len(costs)), key=lambda number: costs[number])
    rungs = dict(zip(errors, ladders.rungs, strict=True))
    assert rungs["conv3"] == (cheapest, 0)
    assert all(len(row) == 1 for name, row in rungs.items() if name != "conv3")


def test_several_limits_hold_for_all_even_where_the_lowest_rungs_do_not_fit():
    """What takes least of two budgets in sum may be over one of them."""
    costs = {"macs": Count("macs"), "params": Count("params")}
    wide = limits_of(space(), {"macs": 0.9, "params": 0.9}, costs)
    least = {limit.prices.quantity: limit.prices.cheapest for limit in wide}
    limits = limits_of(space(), {"macs": least["macs"] * 1.02, "params": least["params"] * 1.02}, costs)
    forms = limits[0].prices.forms
    ladders = Ladders.of(limits, {name: [float(n) for n in range(len(row))] for name, row in forms.items()})
    draw = np.random.default_rng(0)
    for _ in range(20):
        one, other = ladders.drawn(draw), ladders.drawn(draw)
        child = ladders.child(one, other, 0.5, draw)
        assert all(limit.holds(ladders.plan(genes)) for limit in limits for genes in (one, other, child))


def test_at_the_least_budget_there_is_one_network():
    with pytest.raises(BudgetError):
        METHOD(task(0.5), SETTINGS).plan(limits_of(space(), 0.01))
    least = limits_of(space(), 0.5)[0].prices.cheapest
    assert len(METHOD(task(least), SETTINGS).seen) == 1


@pytest.mark.parametrize(
    "wrong", [{"population": 1}, {"generations": 0}, {"images": 1.5}, {"mutation": 2}, {"seed": -1}]
)
def test_settings_are_checked(wrong):
    with pytest.raises(SpecError, match=next(iter(wrong))):
        GeneticSettings(**wrong)
