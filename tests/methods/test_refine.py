from __future__ import annotations

import copy
from itertools import product
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from haloc.methods.budget import limits_of
from haloc.methods.haloc_settings import SearchSettings
from haloc.methods.refine import Prices, drawn_within, refine, towards
from haloc.methods.search import search
from haloc.methods.solve import least_sum
from haloc.methods.supernet import choices, supernet
from haloc.methods.task import Task
from haloc.methods.trials import Trials, examples
from haloc.training.objective import distillation
from haloc.training.settings import TrainSettings
from tests.methods.tiny import batches, find, rank_space_of, trained

PRICES = Prices((np.array([[0.1], [0.3], [0.5]]), np.array([[0.1], [0.2], [0.4]])), np.array([0.2]))


def test_probabilities_go_towards_the_best():
    moved = np.exp(towards(np.log([0.5, 0.25, 0.25]), [2, 0]))
    first, second = log(2.5), log(2.5 / 2)
    share = first / (first + second)
    assert moved.tolist() == pytest.approx([0.6 * 0.5 + 0.4 * (1 - share), 0.6 * 0.25, 0.6 * 0.25 + 0.4 * share])
    assert np.exp(towards(np.log([0.5, 0.5]), [1, 1, 1])).tolist() == pytest.approx([0.3, 0.7])


def test_what_is_next_to_impossible_stays_apart():
    moved = towards(np.array([-60.0, -35.0, 0.0]), [2, 2])
    assert moved.tolist() == pytest.approx([log(0.6) - 60, log(0.6) - 35, 0.0])


def test_what_networks_take_is_counted_with_the_rest():
    assert PRICES.taken(np.array([[0, 0], [2, 1]])).tolist() == [pytest.approx([0.4]), pytest.approx([0.9])]


def test_networks_are_drawn_within_the_budget_and_those_that_use_it_best_are_kept():
    chances = [np.log(np.full(3, 1 / 3))] * 2
    fitting = {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)}  # all but (2, 2), which takes 1.1
    draw = np.random.default_rng(0)
    assert set(drawn_within(PRICES, chances, 20, draw, {})) == fitting
    assert set(drawn_within(PRICES, chances, 2, draw, {})) == {(1, 2), (2, 1)}
    assert (2, 1) not in drawn_within(PRICES, chances, 20, draw, {(2, 1): 0.0})


def test_nothing_within_the_budget_is_nothing_drawn():
    dear = Prices(PRICES.shares, np.array([1.5]))
    assert not drawn_within(dear, [np.log(np.full(3, 1 / 3))] * 2, 4, np.random.default_rng(0), {})


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.set_num_threads(1)
    return trained().eval()


def task_of(model: nn.Module) -> Task:
    space = rank_space_of(model)
    return Task(model, space, limits_of(space, 0.6), val=batches()[1])


def refined(net: nn.Module, model: nn.Module, **how: Any) -> list[dict[str, float]]:
    task = task_of(model)
    how = {"rounds": 6, "networks": 9, "seed": 0} | how
    return list(refine(net, model, task.limits, examples(task, 128), **how))


def test_the_best_network_within_the_budget_becomes_the_likeliest(model):
    task = task_of(model)
    trials, batch = Trials(task, batch_statistics=True), examples(task, 128)
    expected = [model(inputs).detach() for inputs, _ in batch]

    def loss(plan: Any) -> float:
        trials.put(plan)
        rows = zip(batch, expected, strict=True)
        sizes = sum(len(logits) for logits in expected)
        return sum(float(distillation(trials.logits(x[0]), y, 4.0)) * len(y) for x, y in rows) / sizes

    forms = {name: tuple(offer) for name, offer in task.space.open_layers.items()}
    plans = [dict(zip(forms, chosen, strict=True)) for chosen in product(*forms.values())]
    fitting = [plan for plan in plans if all(limit.holds(plan) for limit in task.limits)]
    assert 5 < len(fitting) < len(plans)
    best = min(fitting, key=loss)
    net = supernet(model, task.space)
    told = refined(net, model, rounds=12)
    losses = {name: (-choices(net)[name].log_probabilities).tolist() for name in forms}
    assert dict(least_sum(losses, task.limits)) == best
    assert told[-1]["best"] == pytest.approx(loss(best), rel=1e-3)


def test_only_the_probabilities_are_changed(model):
    net = supernet(model, rank_space_of(model)).train()
    net.get_submodule("norm1").momentum = 0.3
    before = {name: tensor.clone() for name, tensor in net.state_dict().items() if "alpha" not in name}
    refined(net, model)
    after = net.state_dict()
    counted = {name for name in before if not torch.equal(before[name], after[name])}
    assert counted <= {"norm1.num_batches_tracked"}
    assert net.get_submodule("norm1").momentum == 0.3
    assert all(module.training for module in net.modules())
    assert any(choice.alpha.detach().std() > 0 for choice in choices(net).values())


def test_the_same_seed_gives_the_same_probabilities(model):
    alphas = []
    for seed in (0, 0, 1):
        net = supernet(model, rank_space_of(model))
        refined(net, model, rounds=1, networks=3, seed=seed)
        alphas.append(torch.cat([choice.alpha.detach() for choice in choices(net).values()]).tolist())
    assert alphas[0] == alphas[1] != alphas[2]


def test_a_search_ends_with_it(model, tmp_path):
    how = {"rounds": 3, "networks": 6, "images": 64, "weights": "shared"}
    own = copy.deepcopy(model)
    found = find(own, **how, folder=tmp_path)
    rounds = found.evidence.history[-1]["rounds"]
    assert [row["round"] for row in rounds] == [0, 1, 2]
    assert rounds[-1]["best"] <= rounds[0]["best"]
    assert all(spent.cost <= spent.budget for spent in found.spending)
    plain = find(own, **how | {"rounds": 0})
    assert "rounds" not in plain.evidence.history[-1]
    assert plain.evidence.losses != found.evidence.losses
    assert find(own, **how, folder=tmp_path).evidence.losses == found.evidence.losses  # from the checkpoint of the end
    longer = find(own, **how | {"rounds": 4}, folder=tmp_path)  # a finished search is ended in another way
    assert len(longer.evidence.history[-1]["rounds"]) == 4
    stopped = find(own, **how, minutes=1e-6)
    assert not stopped.finished
    assert "rounds" not in (stopped.evidence.history or [{}])[-1]


def test_the_callers_random_numbers_are_left_alone(model):
    state = torch.get_rng_state()
    loader = DataLoader(
        [(image, label) for image, label in zip(*next(iter(batches()[1])), strict=True)], 16, shuffle=True
    )
    settings = SearchSettings(warmup_epochs=0, start="alike", rounds=2, networks=4, images=33)
    found = [
        search(
            model, rank_space_of(model), budget=0.6, train=batches()[0], val=loader, settings=settings,
            training=TrainSettings(epochs=1, lr=0.01, warmup_epochs=0),
        ).evidence.losses
        for seed in (0, 1) if torch.manual_seed(seed)
    ]  # fmt: skip
    assert found[0] == found[1]
    torch.set_rng_state(state)
