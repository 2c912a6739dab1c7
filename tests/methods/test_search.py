from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import nn

from haloc.cost.count import Count
from haloc.cost.model import layers_cost
from haloc.errors import BudgetError, CostError, SpecError
from haloc.factor.inspect import inspect
from haloc.forms import Dense, Tucker2
from haloc.methods.haloc import (
    Hardware,
    SearchSettings,
    WeightObjective,
    path_update,
    probabilities_update,
    search,
)
from haloc.methods.prices import PriceList
from haloc.methods.supernet import choices, supernet
from haloc.training.session import Session
from haloc.training.settings import TrainSettings
from haloc.training.step import Stepper, Update
from tests.methods import tiny
from tests.methods.tiny import IMAGE, MACS, OPEN, batches, find, network, rank_space_of

ONCE = TrainSettings(epochs=1, warmup_epochs=0)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.set_num_threads(1)
    return tiny.trained()


@pytest.fixture(scope="module")
def weights(model, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("digits") / "weights.pt"
    torch.save(model.state_dict(), path)
    return str(path)


def changed_by(update: Update, net: nn.Module) -> set[str]:
    """The parameters that one step of an update changes."""
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    Stepper(net, update, ONCE, Session())(next(iter(update.feed.raw(0))), 0, 0.0)
    return {name for name, parameter in net.named_parameters() if not torch.equal(parameter, before[name])}


def hardware(model: nn.Module, settings: SearchSettings) -> Hardware:
    prices = PriceList.of(rank_space_of(model), MACS)
    rows = tuple(torch.tensor(row, dtype=torch.float32) for row in prices.prices.values())
    return Hardware(rows, prices.rest, 0.5 * prices.dense, settings)


def test_prices_are_those_of_the_whole_network(model):
    space, layers = rank_space_of(model), inspect(model, IMAGE)
    prices = PriceList.of(space, MACS)
    assert prices.forms["conv3"] == (Dense(), Tucker2(1, 1), Tucker2(6, 6))
    assert prices.dense == layers_cost(layers, {}, MACS).value
    plan = {"conv2": Dense(), "conv3": Tucker2(6, 6), "conv4": Tucker2(1, 1)}
    assert prices.cost_of(plan) == layers_cost(layers, plan, MACS).value
    assert prices.cheapest == layers_cost(layers, dict.fromkeys(OPEN, Tucker2(1, 1)), MACS).value


def test_a_layer_that_is_called_twice_counts_twice():
    twice = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1))
    twice.append(twice[0])
    layers = inspect(twice, torch.randn(1, 16, 8, 8))
    space = tiny.RankSpace({"0": tiny.LayerChoices(layers["0"].calls, (tiny.Grid.of("tucker2", [(4, 4)]),))})
    prices = PriceList.of(space, MACS)
    assert prices.dense == 2 * 64 * 16 * 16 * 9
    assert prices.prices["0"][1] == 2 * 64 * (16 * 4 + 4 * 4 * 9 + 4 * 16)


def test_a_budget_is_a_number_or_a_share_that_can_be_reached(model):
    prices = PriceList.of(rank_space_of(model), MACS)
    assert prices.budget(0.5) == 0.5 * prices.dense
    assert prices.budget(90_000) == 90_000
    with pytest.raises(BudgetError, match="cannot be reached.*still cost"):
        prices.budget(0.01)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(SpecError, match="above 0"):
            prices.budget(wrong)


def test_a_weight_step_changes_the_path_and_what_is_around_it(model):
    net = supernet(model, rank_space_of(model))
    original = copy.deepcopy(model).eval()
    changed = changed_by(path_update(net, original, batches()[0], SearchSettings(), ONCE), net)
    active = {f"{name}.candidates.{choice.active}." for name, choice in choices(net).items()}
    inside = {name for name in changed if name.startswith(OPEN)}
    assert all(any(name.startswith(prefix) for name in inside) for prefix in active)
    assert all(name.startswith(tuple(active)) for name in inside)
    assert {"conv1.weight", "norm1.weight", "fc.weight"} <= changed


def test_a_step_of_the_probabilities_changes_them_alone(model):
    net, settings = supernet(model, rank_space_of(model)), SearchSettings()
    update = probabilities_update(net, hardware(model, settings), batches()[1], settings, ONCE)
    assert changed_by(update, net) == {f"{name}.alpha" for name in OPEN}


def test_both_updates_of_a_step_draw_paths_of_their_own(model):
    net, settings = supernet(model, rank_space_of(model)), SearchSettings()
    one = path_update(net, model, batches()[0], settings, ONCE)
    other = probabilities_update(net, hardware(model, settings), batches()[1], settings, ONCE)

    def paths(update: Update) -> list[list[int]]:
        assert update.before_step is not None
        return [[update.before_step(step), *(c.active for c in choices(net).values())] for step in range(10)]

    assert paths(one) != paths(other)


def test_the_weights_approach_the_feature_maps_of_the_original(model):
    model = copy.deepcopy(model).eval()
    net = supernet(model, rank_space_of(model)).eval()
    images, labels = next(iter(batches()[0]))
    objective = WeightObjective(model, OPEN, lam=0.5)
    assert float(objective(net, images, labels).terms["features"].detach()) == 0.0
    net.conv4.active = 1
    terms = objective(net, images, labels).terms
    until = nn.Sequential(*list(net.children())[:9])(images) - nn.Sequential(*list(model.children())[:9])(images)
    assert float(terms["features"].detach()) == pytest.approx(0.5 * until.square().mean().item(), rel=1e-5)
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert list(WeightObjective(model, OPEN, lam=0.0)(net, images, labels).terms) == ["cross_entropy"]


def test_an_overwhelming_penalty_leaves_the_cheapest_candidates(model):
    before = copy.deepcopy(model.state_dict())
    cheapest = PriceList.of(rank_space_of(model), MACS).cheapest
    result = find(model, cheapest, epochs=12, theta=8.0, alpha_lr=0.2)
    assert result.plan == dict.fromkeys(OPEN, Tucker2(1, 1))
    assert all(row[1] == max(row) for row in result.probabilities.values())
    assert result.cost == result.budget == cheapest
    assert result.finished
    costs = [row["val_expected_cost"] for row in result.history]
    assert costs == sorted(costs, reverse=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_without_a_penalty_prices_do_not_matter(model):
    one, other = (
        search(
            model, rank_space_of(model), Count(quantity), 0.9, train=batches()[0], val=batches()[1],
            settings=SearchSettings(theta=0.0, warmup_epochs=0), training=ONCE,
        )
        for quantity in ("macs", "params")
    )  # fmt: skip
    assert one.probabilities == other.probabilities
    assert one.cost != other.cost


def test_the_order_of_the_space_does_not_matter(model):
    space = rank_space_of(model)
    layers = dict(sorted(space.layers.items(), reverse=True, key=lambda item: item[0]))
    one, other = (
        search(
            model, own, MACS, 0.3, train=batches()[0], val=batches()[1],
            settings=SearchSettings(warmup_epochs=0), training=ONCE,
        )
        for own in (space, tiny.RankSpace(layers))
    )  # fmt: skip
    assert list(layers) != list(space.layers)
    assert one.probabilities == other.probabilities
    assert one.plan == other.plan


def test_a_penalty_over_budget_alone_does_not_push_below_it(model):
    costs = [
        find(model, epochs=6, alpha_lr=0.2, one_sided=one).history[-1]["val_expected_cost"] for one in (False, True)
    ]
    assert costs[0] < 0.5 * costs[1]


def test_probabilities_wait_for_the_warm_up(model):
    history = find(model, epochs=2, warmup_epochs=1).history
    assert history[0]["val_entropy"] == pytest.approx(torch.tensor(3.0).log().item())
    assert history[1]["val_entropy"] < history[0]["val_entropy"]
    assert "alpha_loss" not in history[0]


def test_a_search_that_was_stopped_goes_on_as_if_it_had_not_been(model, tmp_path):
    whole = find(model, epochs=3)
    stopped = find(model, epochs=3, minutes=1e-6, folder=tmp_path)
    assert not stopped.finished
    assert stopped.probabilities != whole.probabilities
    assert len(stopped.history) == 1
    resumed = find(model, epochs=3, folder=tmp_path)
    assert resumed.probabilities == whole.probabilities
    assert resumed.finished
    with pytest.raises(SpecError, match="theta = 2.0, and now it is 1.0"):
        find(model, epochs=3, folder=tmp_path, theta=1.0)
    with pytest.raises(SpecError, match="budget"):
        find(model, 0.6, epochs=3, folder=tmp_path)


def test_the_same_seed_finds_the_same_in_another_process(weights):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as others:
        paths, found = others.submit(tiny.paths, weights, 20), others.submit(tiny.probabilities, weights)
        assert paths.result() == tiny.paths(weights, 20)
        assert found.result() == tiny.probabilities(weights)
    model = tiny.restored(weights)
    assert find(model, epochs=1, seed=1).probabilities != find(model, epochs=1, seed=0).probabilities


def test_two_processes_find_what_one_finds(weights, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(port)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, tiny.__file__, weights, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(Path(tmp_path, f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    alone = tiny.probabilities(weights)
    assert all(first[name] == pytest.approx(alone[name], abs=1e-4) for name in OPEN)
    assert alone["conv2"] != [1 / 3] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"eta": 0.0}, {"theta": -1.0}, {"lam": -0.1}, {"alpha_lr": 0.0}, {"warmup_epochs": -1},
        {"warmup_epochs": 0.5}, {"alpha_betas": (0.9, 1.0)}, {"theta": float("inf")},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(wrong):
    with pytest.raises(SpecError, match=next(iter(wrong))):
        SearchSettings(**wrong)


def test_searches_that_would_find_nothing_are_refused():
    model = network()
    space = rank_space_of(model)
    closed = tiny.RankSpace({name: tiny.LayerChoices(offer.calls) for name, offer in space.layers.items()})
    data = {"train": batches()[0], "val": batches()[1]}
    with pytest.raises(SpecError, match="nothing to choose from"):
        search(model, closed, MACS, 0.5, **data)
    with pytest.raises(SpecError, match="warmup_epochs must be below the 2 epochs"):
        find(model, warmup_epochs=2)
    with pytest.raises(SpecError, match="ema"):
        search(model, space, MACS, 0.5, training=TrainSettings(ema=0.9), **data)
    with pytest.raises(BudgetError):
        find(model, 0.001)


def test_what_has_no_price_is_not_taken_for_free(model):
    class Nothing:
        quantity, unit = "latency", "ms"

        def price(self, shape, form):
            raise CostError("no row")

    with pytest.raises(CostError):
        search(model, rank_space_of(model), Nothing(), 0.5, train=batches()[0], val=batches()[1])
