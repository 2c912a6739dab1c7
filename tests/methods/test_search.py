from __future__ import annotations

import copy
import itertools
import json
import math
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from haloc.cost.count import Count
from haloc.errors import BudgetError, CostError, SpecError
from haloc.factor.inspect import inspect
from haloc.factor.surgery import apply_plan
from haloc.forms import Dense, Svd, Tucker2
from haloc.methods.budget import limits_of
from haloc.methods.haloc import path_update, probabilities_update
from haloc.methods.haloc_settings import SearchSettings
from haloc.methods.objectives import Hardware, ProbabilityObjective, WeightObjective
from haloc.methods.prices import PriceList
from haloc.methods.search import search
from haloc.methods.supernet import choices, supernet
from haloc.space import rank_space
from haloc.training.session import Session
from haloc.training.settings import TrainSettings
from haloc.training.step import Stepper, Update
from tests.methods import tiny
from tests.methods.tiny import MACS, OPEN, PAPER, batches, find, network, rank_space_of
from tests.processes import FORKED, two_of

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


def hardware(net: nn.Module) -> Hardware:
    limits = limits_of(rank_space_of(network()), 0.5)
    return Hardware.of(net, limits, eta=1.0, theta=2.0, one_sided=True)


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
    update = probabilities_update(net, hardware(net), batches()[1], settings, ONCE, 10, model)
    assert changed_by(update, net) == {f"{name}.alpha" for name in OPEN}


def test_both_updates_of_a_step_draw_paths_of_their_own(model):
    net, settings = supernet(model, rank_space_of(model)), SearchSettings()
    one = path_update(net, model, batches()[0], settings, ONCE)
    other = probabilities_update(net, hardware(net), batches()[1], settings, ONCE, 10, model)

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


def untimed(history) -> list[dict]:
    return [{name: x for name, x in row.items() if name not in ("seconds", "images_per_s")} for row in history]


def test_an_overwhelming_penalty_leaves_the_cheapest_candidates(model):
    before = copy.deepcopy(model.state_dict())
    cheapest = PriceList.of(rank_space_of(model), MACS).cheapest
    result = find(model, cheapest, epochs=12, theta=20.0, alpha_lr=0.2, alpha_betas=(0.5, 0.9))
    assert result.plan == dict.fromkeys(OPEN, Tucker2(1, 1))
    assert all(row[1] == max(row) for row in result.evidence.probabilities.values())
    assert result.spending[0].cost == result.spending[0].budget == cheapest
    assert result.finished
    costs = [row["val_expected_macs"] for row in result.evidence.history]
    assert costs == sorted(costs, reverse=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_without_a_penalty_prices_do_not_matter(model):
    one, other = (
        search(
            model, rank_space_of(model), cost=Count(quantity), budget=0.9, train=batches()[0], val=batches()[1],
            settings=SearchSettings(theta=0.0, warmup_epochs=0, **PAPER), training=ONCE,
        )
        for quantity in ("macs", "params")
    )  # fmt: skip
    assert one.evidence.probabilities == other.evidence.probabilities


def test_the_order_of_the_space_does_not_matter(model):
    space = rank_space_of(model)
    layers = dict(sorted(space.layers.items(), reverse=True, key=lambda item: item[0]))
    one, other = (
        search(
            model, own, budget=0.3, train=batches()[0], val=batches()[1],
            settings=SearchSettings(warmup_epochs=0), training=ONCE,
        )
        for own in (space, tiny.RankSpace(layers))
    )  # fmt: skip
    assert list(layers) != list(space.layers)
    assert one.evidence.probabilities == other.evidence.probabilities
    assert one.plan == other.plan


def test_a_penalty_over_budget_alone_does_not_push_below_it(model):
    found = [find(model, epochs=6, alpha_lr=0.2, one_sided=sided) for sided in (False, True)]
    costs = [result.evidence.history[-1]["val_expected_macs"] / result.spending[0].budget for result in found]
    assert costs[0] < 0.75
    assert costs[1] > 0.95


def test_probabilities_wait_for_the_warm_up(model):
    history = find(model, epochs=2, warmup_epochs=1).evidence.history
    assert history[0]["val_entropy"] == pytest.approx(torch.tensor(3.0).log().item())
    assert history[1]["val_entropy"] < history[0]["val_entropy"]
    assert "alpha_loss" not in history[0]


def test_a_search_that_was_stopped_goes_on_as_if_it_had_not_been(model, tmp_path):
    whole = find(model, epochs=3)
    stopped = find(model, epochs=3, minutes=1e-6, folder=tmp_path)
    assert not stopped.finished
    assert stopped.evidence.losses != whole.evidence.losses
    assert len(stopped.evidence.history) == 1
    resumed = find(model, epochs=3, folder=tmp_path)
    assert resumed.evidence.losses == whole.evidence.losses
    assert untimed(resumed.evidence.history) == untimed(whole.evidence.history)
    assert resumed.finished
    with pytest.raises(SpecError, match="theta = 2.0, and now it is 1.0"):
        find(model, epochs=3, folder=tmp_path, theta=1.0)
    with pytest.raises(SpecError, match="budget"):
        find(model, 0.6, epochs=3, folder=tmp_path)


@pytest.mark.parametrize("gradient", ["all", "pair", "single", "mixture"])
@pytest.mark.parametrize("weights", ["own", "shared"])
def test_every_way_searches_keeps_to_the_budget_and_goes_on(model, tmp_path, gradient, weights):
    how = {"gradient": gradient, "weights": weights, "temperature": 2.0, "temperature_end": 0.5, "lam_end": 0.0}
    whole = find(model, {"macs": "45%", "params": "60%"}, **how, alpha_every=3)
    assert all(row.cost <= row.budget for row in whole.spending)
    assert all(row[0] != row[1] for row in whole.evidence.losses.values()), "nothing was learned"
    find(model, {"macs": "45%", "params": "60%"}, **how, alpha_every=3, minutes=1e-6, folder=tmp_path)
    resumed = find(model, {"macs": "45%", "params": "60%"}, **how, alpha_every=3, folder=tmp_path)
    assert resumed.evidence.losses == whole.evidence.losses


def test_alpha_steps_as_often_as_it_is_told_and_its_means_are_over_its_own_steps(model, monkeypatch):
    seen: dict[int, list[float]] = {}
    real = ProbabilityObjective.__call__

    def counting(self, *args):
        loss = real(self, *args)
        seen.setdefault(every, []).append(float(loss.total.detach()))
        return loss

    monkeypatch.setattr(ProbabilityObjective, "__call__", counting)
    for every in (1, 4):
        history = find(model, epochs=1, alpha_every=every).evidence.history
        assert history[-1]["alpha_loss"] == pytest.approx(sum(seen[every]) / len(seen[every]))
    assert len(seen[4]) == -(-len(seen[1]) // 4)


def test_a_search_may_begin_with_what_another_method_thinks(model, tmp_path):
    how = {"epochs": 2, "warmup_epochs": 1, "start": "sensitivity", "start_spread": 0.4}
    found = find(model, 0.4, **how)
    first = found.evidence.history[0]
    assert first["val_entropy"] == pytest.approx(0.4 * math.log(3), rel=0.1)
    assert first["val_expected_macs"] <= 1.001 * found.spending[0].budget
    find(model, 0.4, **how, minutes=1e-6, folder=tmp_path)
    assert find(model, 0.4, **how, folder=tmp_path).evidence.losses == found.evidence.losses


def test_a_cold_search_likes_best_what_it_can_pay_for(model):
    cold = find(model, 0.5, epochs=6, alpha_lr=0.2, temperature_end=0.05).evidence
    last = cold.history[-1]
    assert last["val_likeliest_macs"] == pytest.approx(last["val_expected_macs"], rel=0.15)
    assert last["val_entropy"] < 0.2


def test_probabilities_may_learn_from_the_answers_of_the_original(model):
    net = supernet(model, rank_space_of(model))
    images, labels = next(iter(batches()[1]))
    original = copy.deepcopy(model).eval()
    one, other = (ProbabilityObjective(hardware(net), teacher=teacher) for teacher in (None, original))
    said = original(images).detach().softmax(1)
    expected = -(said * net(images).log_softmax(1)).sum(1).mean()
    penalty = hardware(net).penalty([choice.probabilities for choice in choices(net).values()])
    assert float(other(net, images, labels).total.detach()) == pytest.approx(
        float((expected * penalty).detach()), rel=1e-4
    )
    assert float(one(net, images, labels).total.detach()) != float(other(net, images, labels).total.detach())


def test_nothing_is_decided_while_the_weights_warm_up(model):
    how = {"start": "sensitivity", "start_spread": 0.4, "temperature_end": 0.1}
    rows = find(model, 0.4, epochs=4, warmup_epochs=3, **how).evidence.history
    assert [row["val_entropy"] for row in rows[:3]] == pytest.approx([rows[0]["val_entropy"]] * 3)
    assert rows[3]["val_entropy"] < 0.7 * rows[0]["val_entropy"]


@pytest.mark.parametrize("gradient", ["all", "pair", "single", "mixture"])
def test_what_follows_a_choice_may_work_in_place(gradient):
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)
    )
    model = model.append(nn.Flatten()).append(nn.Linear(512, 10))
    space = rank_space(inspect(model, tiny.IMAGE), names=["2"])
    own, held = batches()
    settings = SearchSettings(warmup_epochs=0, gradient=gradient, **PAPER)
    found = search(model, space, budget=0.8, train=own, val=held, settings=settings, training=ONCE)
    assert found.finished


def test_a_search_may_run_out_of_time_within_its_first_epoch(model, monkeypatch):
    monkeypatch.setattr("haloc.training.loop.STRETCH", 2)
    found = find(model, epochs=2, minutes=1e-6)
    assert not found.finished
    assert found.evidence.history == []


def test_an_epoch_in_which_the_probabilities_do_not_step_tells_nothing_of_them(model):
    steps = batches()[0].steps
    history = find(model, epochs=2, alpha_every=steps + 1).evidence.history
    assert "alpha_loss" in history[0]
    assert "alpha_loss" in history[1]
    history = find(model, epochs=3, alpha_every=2 * steps).evidence.history
    assert ["alpha_loss" in row for row in history] == [True, False, True]


def test_logits_may_come_in_a_dict(model):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = copy.deepcopy(model)

        def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.net(images)}

    named = Named()
    space = rank_space(inspect(named, tiny.IMAGE), names=["net.conv3"], round_to=4)
    own, held = batches()
    settings = SearchSettings(warmup_epochs=0, start="sensitivity")
    assert search(named, space, budget=0.9, train=own, val=held, settings=settings, training=ONCE).finished


def test_the_history_tells_how_the_search_went(model):
    evidence = find(model, epochs=3, warmup_epochs=1).evidence
    rows = evidence.history
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert all(p == pytest.approx(1 / 3, abs=1e-4) for p in rows[0]["probabilities"]["conv2"])
    assert rows[-1]["probabilities"]["conv3"] == pytest.approx(evidence.probabilities["conv3"], abs=1e-4)
    # A third of dense and of both ranks each: the mean of three counts, and what is outside of the layers.
    params = PriceList.of(evidence.space, Count("params"))
    mean = params.rest + sum(sum(row) / 3 for row in params.prices.values())
    assert rows[0]["val_expected_params"] == pytest.approx(mean)
    assert {"val_likeliest_params", "val_likeliest_macs", "features", "cross_entropy"} <= set(rows[0])


def planted() -> nn.Module:
    """Three layers side by side whose sum are the logits: the first has rank 1, the second 2, the third full rank."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            draw = torch.Generator().manual_seed(3)
            self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
            for layer, spectrum in zip(self.layers, ((4, *[0] * 7), (3, 3, *[0] * 6), (2,) * 8), strict=True):
                left, right = (torch.linalg.qr(torch.randn(8, 8, generator=draw)).Q for _ in range(2))
                layer.weight.data = left @ torch.diag(torch.tensor(spectrum, dtype=torch.float32)) @ right

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return sum(layer(inputs) for layer in self.layers)

    return Sum()


def test_the_search_finds_the_best_of_all_networks_of_a_toy_for_each_of_20_seeds():
    model = planted()
    inputs = torch.randn(512, 8, generator=torch.Generator().manual_seed(1))
    labels = model(inputs).argmax(1)
    loader = [(inputs[start : start + 64], labels[start : start + 64]) for start in range(0, 512, 64)]
    space = rank_space(inspect(model, inputs[:1]), round_to=1, forms=["svd"])
    grids = (tiny.Grid.of("svd", [(1,), (2,)]),)
    few = {name: tiny.LayerChoices(offer.calls, grids) for name, offer in space.layers.items()}
    space = tiny.RankSpace(few)
    (limit,) = limits_of(space, "60%")
    found = {}
    for plan in itertools.product(*(tuple(offer) for offer in few.values())):
        named = dict(zip(few, plan, strict=True))
        if limit.holds(named):
            logits = apply_plan(model, named)(inputs)
            found[plan] = float(nn.functional.cross_entropy(logits, labels).detach())
    best = dict(zip(few, min(found, key=found.get), strict=True))
    assert best == {"layers.0": Svd(1), "layers.1": Svd(2), "layers.2": Dense()}
    assert 5 < len(found) < 27
    settings = SearchSettings(warmup_epochs=0, alpha_lr=0.1, **PAPER)
    for seed in range(20):
        training = TrainSettings(epochs=6, lr=1e-3, warmup_epochs=0, seed=seed)
        result = search(model, space, budget="60%", train=loader, val=loader, settings=settings, training=training)
        assert result.plan == best, seed


def test_the_same_seed_finds_the_same_in_another_process(weights):
    with ProcessPoolExecutor(1, mp_context=FORKED) as others:
        paths, found = others.submit(tiny.paths, weights, 20), others.submit(tiny.probabilities, weights)
        assert paths.result() == tiny.paths(weights, 20)
        assert found.result() == tiny.probabilities(weights)
    model = tiny.restored(weights)
    assert find(model, epochs=1, seed=1).evidence.losses != find(model, epochs=1, seed=0).evidence.losses


def test_two_processes_find_what_one_finds(weights, tmp_path):
    two_of(tiny.searched_together, weights, tmp_path, folder=tmp_path)
    first, second = (json.loads(Path(tmp_path, f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    alone = tiny.probabilities(weights)
    assert all(first[name] == pytest.approx(alone[name], abs=1e-4) for name in OPEN)
    assert alone["conv2"] != [1 / 3] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"eta": 0.0}, {"theta": -1.0}, {"lam": -0.1}, {"alpha_lr": 0.0}, {"warmup_epochs": -1},
        {"warmup_epochs": 0.5}, {"alpha_betas": (0.9, 1.0)}, {"theta": float("inf")}, {"gradient": "none"},
        {"weights": "borrowed"}, {"start": "anywhere"}, {"start_spread": 1.0}, {"temperature": 0.0},
        {"temperature_end": -1.0}, {"lam_end": -0.1}, {"alpha_every": 0}, {"alpha_betas": (0.5,)}, {"alpha_betas": 0.5},
        {"eta": "x"}, {"start_spread": None}, {"lam": True},
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
        search(model, closed, budget=0.5, **data)
    with pytest.raises(SpecError, match="warmup_epochs must be below the 2 epochs"):
        find(model, warmup_epochs=2)
    with pytest.raises(SpecError, match="ema"):
        search(model, space, budget=0.5, training=TrainSettings(ema=0.9), **data)
    with pytest.raises(BudgetError):
        find(model, 0.001)


def test_what_has_no_price_is_not_taken_for_free(model):
    class Nothing:
        quantity, unit = "latency", "ms"

        def price(self, shape, form):
            raise CostError("no row")

    with pytest.raises(CostError):
        search(model, rank_space_of(model), cost=Nothing(), budget=0.5, train=batches()[0], val=batches()[1])
