"""Every method on a network with several outputs, batches with names of their own, and the user's own loss."""

from __future__ import annotations

from functools import cache
from math import inf, isclose
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from haloc.errors import ModelError, SpecError
from haloc.factor.calibrate import calibrate
from haloc.factor.inspect import inspect
from haloc.factor.surgery import apply_plan
from haloc.methods.budget import limits_of
from haloc.methods.haloc_settings import SearchSettings
from haloc.methods.notes import fingerprint
from haloc.methods.objectives import Hardware, OwnProbabilityObjective
from haloc.methods.search import METHODS, SearchResult, method_of, search
from haloc.methods.sensitivity import METHOD, SensitivitySettings
from haloc.methods.supernet import choices, supernet
from haloc.methods.task import Task
from haloc.methods.trials import examples, take_statistics_from_batches
from haloc.training.objective import OwnLoss
from haloc.training.outputs import distance
from haloc.training.settings import TrainSettings
from tests import twofold
from tests.methods.test_behaviour import SETTINGS, TRAINING, state, told
from tests.twofold import OPEN, PICTURE, batches, rank_space_of


def found(name: str, model: nn.Module, **options: Any) -> SearchResult:
    method = method_of(name)
    data = {"train": batches(4), "val": batches(2, seed=1)}
    given: dict[str, Any] = {need.split("|")[0]: data[need.split("|")[0]] for need in method.needs}
    given |= {"loss": twofold.loss, "inputs": twofold.inputs} | ({"training": TRAINING} if method.trains else {})
    given |= {"settings": SETTINGS[name]()} if name in SETTINGS else {}
    return search(model, rank_space_of(model), budget=0.5, method=name, **given | options)


@cache
def model() -> nn.Module:
    return twofold.trained()


@cache
def result(name: str) -> SearchResult:
    return found(name, model())


@pytest.mark.parametrize("name", METHODS)
def test_the_budget_is_met_and_every_open_layer_has_a_form(name):
    (row,) = result(name).spending
    plan = result(name).plan
    assert row.cost <= row.budget == 0.5 * row.dense
    assert list(plan) == list(OPEN)
    small = apply_plan(model(), plan)
    assert inspect(small, PICTURE).macs == row.cost
    assert small(PICTURE).quarter.shape == (1, 4)


@pytest.mark.parametrize("name", METHODS)
def test_it_finds_the_same_again_and_leaves_the_model_alone(name):
    given = twofold.trained().train()
    given.conv3.eval()
    before = state(given)
    assert told(found(name, given)) == told(result(name))
    after = state(given)
    assert all(torch.equal(value, before["values"][key]) for key, value in after.pop("values").items())
    assert after == {key: value for key, value in before.items() if key != "values"}


@pytest.mark.parametrize("name", [name for name in METHODS if method_of(name).needs])
def test_the_loss_has_its_say(name):
    def upside_down(network: nn.Module, batch: twofold.Batch) -> Tensor:
        answer = network(batch["picture"], gain=batch["gain"])
        return answer.more["light"][0].square().mean() + answer.quarter.square().mean()

    settings = SensitivitySettings(images=64, measure="loss") if name == "sensitivity" else SETTINGS[name]()
    one, other = (found(name, model(), loss=loss, settings=settings) for loss in (twofold.loss, upside_down))
    assert told(one)["losses"] != told(other)["losses"] or told(one)["seen"] != told(other)["seen"]


def task(**options: Any) -> Task:
    space = rank_space_of(model())
    given = {"val": batches(2, seed=1), "loss": twofold.loss, "inputs": twofold.inputs} | options
    return Task(model(), space, limits_of(space, 0.5), **given)


def changed(name: str, number: int) -> nn.Module:
    """The network with one layer in one of its forms, and BatchNorms as they are on trial."""
    small = (
        apply_plan(model(), {name: tuple(rank_space_of(model()).layers[name])[number]}) if name else twofold.trained()
    )
    take_statistics_from_batches(small.eval())
    return small


@pytest.mark.parametrize("options", [{}, {"loss": None}], ids=["own loss", "no loss, and no classes"])
def test_sensitivities_are_distances_of_all_outputs(options):
    evidence = METHOD(task(**options), SensitivitySettings(images=64))
    with torch.no_grad():
        for name in OPEN:
            expected = 0.0
            for batch in batches(2, seed=1):
                after, before = (each(**twofold.inputs(batch)) for each in (changed(name, 2), changed("", 0)))
                lights = after.more["light"][0], before.more["light"][0]
                for mine, theirs in ((after.quarter, before.quarter), lights):
                    expected += float((mine - theirs).square().sum() / theirs.square().sum()) / 4
            assert isclose(evidence.losses[name][2], expected, rel_tol=1e-3)
            assert evidence.losses[name][0] == 0 < min(evidence.losses[name][1:]) <= max(evidence.losses[name]) < inf


def test_with_the_loss_as_the_measure_it_is_the_growth_of_the_users():
    evidence = METHOD(task(), SensitivitySettings(images=64, measure="loss"))
    with torch.no_grad():
        grown = [
            sum(twofold.loss(changed("conv2", 1), batch).values()) - sum(twofold.loss(changed("", 0), batch).values())
            for batch in batches(2, seed=1)
        ]
    assert isclose(evidence.losses["conv2"][1], float(sum(grown)) / 2, rel_tol=1e-3)


def test_a_loss_that_calls_the_network_twice_is_measured_whole():
    def twice(network: nn.Module, batch: twofold.Batch) -> Tensor:
        one, other = (network(pictures).quarter for pictures in (batch["picture"], -batch["picture"]))
        return F.cross_entropy(one, batch["quarter"]) + 0.1 * other.square().mean()

    evidence = METHOD(task(loss=twice), SensitivitySettings(images=64, measure="loss"))
    with torch.no_grad():
        grown = [twice(changed("conv3", 1), each) - twice(changed("", 0), each) for each in batches(2, seed=1)]
    assert isclose(evidence.losses["conv3"][1], float(sum(grown)) / 2, rel_tol=1e-3)


def test_the_fitness_of_a_bred_network_is_the_users_loss():
    best, loss = min(result("genetic").evidence.seen, key=lambda each: each[1])
    small = apply_plan(model(), best).eval()
    take_statistics_from_batches(small)
    with torch.no_grad():
        said = [float(sum(twofold.loss(small, batch).values())) for batch in batches(2, seed=1)]
    assert isclose(loss, sum(said) / 2, rel_tol=1e-4)


@pytest.mark.parametrize("soft", [False, True])
def test_the_search_learns_by_the_users_loss_and_the_rounds_go_by_outputs(soft):
    settings = SearchSettings(warmup_epochs=0, alpha_every=1, rounds=2, networks=4, images=64, lam=0.1, soft=soft)
    (row,) = found("haloc", model(), settings=settings).evidence.history
    assert row["loss"] == pytest.approx(row["quarters"] + row["lights"] + row["features"], rel=1e-5)
    assert row["alpha_penalised"] == row["alpha_loss"] > 0
    assert len(row["rounds"]) == 2


def test_probabilities_learn_by_the_loss_or_by_the_distance_to_the_original():
    net, (batch,) = supernet(model(), rank_space_of(model())).eval(), batches(1)
    for choice in choices(net).values():
        choice.active = 1
    hardware = Hardware.of(net, task().limits, eta=2.0, theta=0.0, one_sided=True)
    with torch.no_grad():
        plain = sum(twofold.loss(net, batch).values())
        apart = distance(net(**twofold.inputs(batch)), model()(**twofold.inputs(batch)))
    for teacher, expected in ((None, plain), (model(), apart)):
        found = OwnProbabilityObjective(hardware, teacher=teacher, loss=OwnLoss(twofold.loss))(net, batch)
        torch.testing.assert_close(found.total.detach(), 2 * expected)
        found.total.backward()
        assert all(choice.alpha.grad.abs().sum() > 0 for choice in choices(net).values())
        assert net.quarter.weight.grad is None


def test_moments_of_batches_with_names_of_their_own_are_used():
    moments = calibrate(model(), batches(2), OPEN, inputs=twofold.inputs)
    assert told(found("sensitivity", model(), moments=moments)) != told(result("sensitivity"))


def another(model: nn.Module, batch: twofold.Batch) -> dict[str, Tensor]:
    return twofold.loss(model, batch)


def test_what_was_measured_by_another_loss_is_not_used(tmp_path, caplog):
    batch = examples(task(), 32)
    assert len({fingerprint(task(**given), batch) for given in ({}, {"loss": None}, {"loss": another})}) == 3
    settings = SensitivitySettings(images=32)
    for loss in (twofold.loss, another):
        METHOD(task(loss=loss, folder=tmp_path), settings)
    assert "is not used" in caplog.text


@pytest.mark.parametrize("name", ["haloc", "lc"])
def test_a_search_by_another_loss_does_not_go_on(name, tmp_path):
    found(name, model(), folder=tmp_path)
    with pytest.raises(SpecError, match="loss"):
        found(name, model(), folder=tmp_path, loss=another, training=TrainSettings(epochs=2, lr=0.01, warmup_epochs=0))


def test_lists_of_examples_are_counted_cut_and_run():
    def rows(count: int, seed: int) -> list[twofold.Batch]:
        whole = twofold.batch(count, seed)
        return [{name: value[number] for name, value in whole.items()} for number in range(count)]

    def put_together(listed: list[twofold.Batch]) -> twofold.Batch:
        return {name: torch.stack([row[name] for row in listed]) for name in listed[0]}

    given = {
        "val": [rows(32, 100), rows(32, 101)],
        "loss": lambda network, listed: twofold.loss(network, put_together(listed)),
        "inputs": lambda listed: twofold.inputs(put_together(listed)),
    }
    assert [len(listed) for _, listed in examples(task(**given), 40)] == [32, 8]
    one, other = (METHOD(task(**options), SensitivitySettings(images=40)) for options in ({}, given))
    assert one.losses == other.losses
    with pytest.raises(Exception, match="give inputs=, a function that takes the model's inputs out of a batch"):
        METHOD(task(**given | {"inputs": None}), SensitivitySettings(images=40))


def test_a_network_that_cannot_be_judged_by_classes_asks_for_a_loss():
    pairs = [(batch["picture"], batch["light"]) for batch in batches(2)]
    with pytest.raises(ModelError, match="give loss="):
        search(model(), rank_space_of(model()), budget=0.5, method="genetic", val=pairs)


def test_outputs_of_other_shapes_cannot_be_compared():
    with pytest.raises(ModelError, match="cannot be compared"):
        distance(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ModelError, match="cannot be compared"):
        distance(torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long))
