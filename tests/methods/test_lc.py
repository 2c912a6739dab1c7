from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from haloc.errors import PlanError, SpecError, TrainError
from haloc.factor.inspect import inspect
from haloc.factor.modules import Factoriser
from haloc.forms import Dense, Form, Spatial, Svd, Tucker2
from haloc.methods.budget import limits_of
from haloc.methods.evidence import Evidence
from haloc.methods.lc import LcSettings, Penalised, Rounds
from haloc.methods.lc_step import Attracted, approximation, compress, squared_errors
from haloc.methods.search import search
from haloc.shapes import LinearShape
from haloc.space import Grid, LayerChoices, RankSpace
from haloc.training.settings import TrainSettings
from haloc.zoo.digits import DIGITS, load_digits
from tests.methods import tiny

FORMS = (Dense(), Svd(1))
OFFERS = {"0": FORMS, "1": FORMS}
TRAINING = TrainSettings(epochs=3, lr=0.05, warmup_epochs=0, save_every_s=0)
SETTINGS = LcSettings(rounds=5, mu=0.1, mu_end=10.0)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.set_num_threads(1)
    return tiny.trained()


def two_layers() -> nn.Sequential:
    """Singular values 3, 1 and 4, 2: at rank 1 the squared errors are 1 and 4."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer, values in zip(model, ((3.0, 1.0, 0, 0), (4.0, 2.0, 0, 0)), strict=True):
        layer.weight.data = torch.diag(torch.tensor(values))
    return model


def space_of_two() -> RankSpace:
    choices = LayerChoices((LinearShape(4, 4, bias=False),), (Grid.of("svd", [(1,)]),))
    return RankSpace({"0": choices, "1": choices})


def space_of(model: nn.Module, settings: Sequence[tuple[int, int]] = ((1, 1), (2, 2), (6, 6))) -> RankSpace:
    grids = (Grid.of("tucker2", settings),)
    layers = inspect(model, tiny.IMAGE)
    choices = {layer.name: LayerChoices(layer.calls, grids if layer.name in tiny.OPEN else ()) for layer in layers}
    return RankSpace(choices)


def found(model: nn.Module, settings: LcSettings = SETTINGS, **options: Any) -> Evidence:
    options = {"training": TRAINING, "train": tiny.batches()[0], "budget": 0.5, **options}
    return search(model, space_of(model), method="lc", settings=settings, **options).evidence


def test_the_c_step_takes_the_ranks_with_the_least_error_that_can_be_paid_for():
    model = Attracted(two_layers(), OFFERS)
    plan = compress(model, OFFERS, limits_of(space_of_two(), 24.0), mu=0.5)  # 16 for dense, 8 for rank 1
    assert plan == {"0": Svd(1), "1": Dense()}
    assert torch.allclose(model.targets[:16].reshape(4, 4), torch.diag(torch.tensor([3.0, 0, 0, 0])), atol=1e-6)
    assert torch.allclose(model.targets[16:].reshape(4, 4), model.network[1].weight)
    assert float(model.squared_distance().detach()) == pytest.approx(1.0)
    assert model.relative_distance() == pytest.approx((1 / 30) ** 0.5)


def test_both_layers_are_cut_where_the_budget_asks_for_it_and_none_where_it_does_not():
    model = Attracted(two_layers(), OFFERS)
    assert compress(model, OFFERS, limits_of(space_of_two(), 16.0), 1.0) == {"0": Svd(1), "1": Svd(1)}
    assert float(model.squared_distance().detach()) == pytest.approx(5.0)
    assert compress(model, OFFERS, limits_of(space_of_two(), 32.0), 1.0) == {"0": Dense(), "1": Dense()}
    assert float(model.squared_distance().detach()) == pytest.approx(0.0, abs=1e-9)


def test_the_penalty_is_half_mu_times_the_squared_distance_and_pulls_by_mu_times_the_difference():
    model = Attracted(two_layers(), OFFERS)
    compress(model, OFFERS, limits_of(space_of_two(), 16.0), mu=0.5)
    loss = Penalised(model)(model, torch.zeros(2, 4), torch.tensor([0, 1]))
    assert set(loss.terms) == {"cross_entropy", "penalty"}
    assert float(loss.terms["penalty"].detach()) == pytest.approx(0.5 / 2 * 5)
    assert float(loss.terms["cross_entropy"].detach()) == pytest.approx(torch.tensor(4.0).log().item())
    loss.total.backward()  # inputs of zero: the gradient is that of the penalty
    assert torch.allclose(model.network[0].weight.grad, torch.diag(torch.tensor([0, 0.5, 0, 0])), atol=1e-6)
    assert torch.allclose(model.network[1].weight.grad, torch.diag(torch.tensor([0, 1.0, 0, 0])), atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "forms"),
    [
        (nn.Linear(6, 9), [Svd(1), Svd(4), Svd(6)]),
        (nn.Conv2d(6, 9, 1), [Svd(2), Svd(5)]),
        (nn.Conv2d(6, 4, (3, 5)), [Spatial(1), Spatial(7), Spatial(18)]),
        (nn.Conv2d(6, 9, 3), [Tucker2(4, 6), Tucker2(9, 2), Tucker2(9, 6)]),
        (nn.Conv2d(6, 12, 3, groups=3), [Tucker2(1, 2), Tucker2(4, 1), Spatial(3)]),
        (nn.Conv1d(6, 8, 3), [Tucker2(3, 6)]),
    ],
    ids=["linear", "pointwise", "spatial", "one-sided", "grouped", "1d"],
)
def test_errors_of_a_singular_value_decomposition_are_exact(layer: nn.Module, forms: list[Form]):
    exact = [float((layer.weight - approximation(layer, form)).square().sum().detach()) for form in forms]
    assert squared_errors(layer, forms) == pytest.approx(exact, rel=1e-5, abs=1e-9)
    relative = [Factoriser(layer).error(form) ** 2 * float(layer.weight.square().sum().detach()) for form in forms]
    assert squared_errors(layer, forms) == pytest.approx(relative, rel=1e-5, abs=1e-9)
    assert squared_errors(layer, [Dense()]) == (0.0,)


def test_the_error_of_two_sided_tucker_is_bounded_from_above_by_little():
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 24, 3)
    forms = [Tucker2(2, 2), Tucker2(8, 5), Tucker2(20, 12)]
    exact = [float((layer.weight - approximation(layer, form)).square().sum().detach()) for form in forms]
    for bound, least in zip(squared_errors(layer, forms), exact, strict=True):
        assert least <= bound <= 1.2 * least


def test_a_layer_of_low_rank_is_compressed_for_nothing():
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 24, 3)
    layer.weight.data = approximation(layer, Tucker2(2, 2)).float()
    one, two, six = squared_errors(layer, [Tucker2(1, 1), Tucker2(2, 2), Tucker2(6, 6)])
    assert one > 0.1 * float(layer.weight.square().sum().detach())
    assert max(two, six) < 1e-10 * one


def test_a_layer_of_low_rank_gets_the_rank_that_it_has(model):
    planted = tiny.network()
    planted.load_state_dict(model.state_dict())
    planted.conv3.weight.data = approximation(model.conv3, Tucker2(2, 2)).float()
    training = TrainSettings(epochs=2, lr=0.005, warmup_epochs=0)
    result = search(
        planted, space_of(planted), budget=0.5, method="lc", settings=SETTINGS,
        train=tiny.batches()[0], training=training,
    )  # fmt: skip
    assert result.plan["conv3"] == Tucker2(2, 2)
    _, one, two, _ = result.evidence.losses["conv3"]
    assert two < 0.02 * one


def test_the_weights_come_near_the_ranks_and_the_network_stays_itself(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = search(
        model, space_of(model), budget=0.5, method="lc", settings=SETTINGS, train=tiny.batches()[0], training=TRAINING
    )
    history = result.evidence.history
    distances = [row["val_distance"] for row in history]
    assert distances == sorted(distances, reverse=True)
    first = Attracted(model, OFFERS_OF_TINY)
    compress(first, OFFERS_OF_TINY, limits_of(space_of(model), 0.5), 1.0)
    assert distances[-1] < 0.1 * first.relative_distance()
    assert [row["val_mu"] for row in history] == pytest.approx([0.1 * 10**0.5, 0.1 * 10**1.5, 10.0])
    assert history[-1]["accuracy"] > 0.9
    assert result.evidence.finished
    assert result.spending[0].remains <= 0.5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


OFFERS_OF_TINY = {name: tuple(row) for name, row in space_of(tiny.network()).open_layers.items()}


def test_the_same_seed_gives_the_same_losses_and_another_order_of_the_images_others(model):
    ones, same = found(model), found(model)
    assert ones.losses == same.losses
    assert ones.losses != found(model, train=tiny.batches()[1]).losses
    assert ones.settings == {"rounds": 5, "mu": 0.1, "mu_end": 10.0}


def test_a_search_that_was_interrupted_ends_as_if_it_had_not_been(model, tmp_path):
    whole = found(model)

    class StoppedError(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress.ended and progress.epoch >= 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        found(model, folder=tmp_path, on_progress=stop)
    kept = sorted((tmp_path / "checkpoints").iterdir())
    assert kept  # of the first epoch, in the middle of a round
    resumed = found(model, folder=tmp_path)
    assert resumed.losses == whole.losses
    assert [row["loss"] for row in resumed.history] == [row["loss"] for row in whole.history]
    again = found(model, folder=tmp_path)  # nothing is left to do
    assert again.losses == whole.losses


def test_a_search_goes_on_with_its_own_budget_alone(model, tmp_path):
    found(model, folder=tmp_path)
    with pytest.raises(SpecError, match="limits.0.macs.budget"):
        found(model, folder=tmp_path, budget=0.4)
    with pytest.raises(SpecError, match="lc.mu_end"):
        found(model, LcSettings(rounds=5, mu=0.1, mu_end=20.0), folder=tmp_path)


def test_time_that_is_up_is_said(model, tmp_path):
    short = TrainSettings(epochs=3, lr=0.05, warmup_epochs=0, minutes=1e-6)
    assert not found(model, training=short, folder=tmp_path).finished


def test_rounds_have_equal_shares_of_the_steps_and_mu_grows_by_the_same_factor():
    rounds = Rounds(LcSettings(rounds=4, mu=1.0, mu_end=8.0), steps=10)
    assert [rounds.at(step) for step in range(12)] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert [step for step in range(10) if rounds.begins(step)] == [0, 3, 5, 8]
    assert [rounds.mu(step) for step in (0, 3, 5, 8)] == pytest.approx([1.0, 2.0, 4.0, 8.0])
    assert LcSettings(rounds=1, mu=0.5).mu_of(0) == 0.5


def test_steps_are_no_longer_than_the_penalty_allows(model):
    settings = LcSettings(rounds=3, mu=50.0, mu_end=200.0)
    assert [row["lr"] for row in found(model, settings).history] == pytest.approx([0.01, 0.005, 0.0], abs=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"channels_last": True}], ids=["plain", "channels last"])
def test_captured_steps_see_what_the_c_steps_change(model, options, caplog):
    device = copy.deepcopy(model).cuda()
    feed = load_digits()[0].on("cuda").batches(64, normalisation=DIGITS, shuffle=True)
    trainings = [TrainSettings(epochs=3, lr=0.02, warmup_epochs=0, speed=x, **options) for x in ("eager", "graph")]
    eager, captured = (found(device, train=feed, training=training) for training in trainings)
    assert not caplog.records
    for one, other in zip(eager.history, captured.history, strict=True):
        assert one["val_mu"] == other["val_mu"]
        assert one["val_distance"] == pytest.approx(other["val_distance"], rel=0.02)
        assert one["penalty"] == pytest.approx(other["penalty"], rel=0.02)


def test_weights_that_are_not_finite_are_refused():
    broken = two_layers()
    broken[1].weight.data[0, 0] = float("nan")
    with pytest.raises(TrainError, match="layer '1' has weights that are not finite"):
        compress(Attracted(broken, OFFERS), OFFERS, limits_of(space_of_two(), 24.0), 1.0)


def test_what_cannot_be_done_is_refused(model):
    with pytest.raises(SpecError, match="mu_end must be at least mu, 1.0, got 0.5"):
        LcSettings(mu=1.0, mu_end=0.5)
    with pytest.raises(SpecError, match="rounds must be a whole number from 1, got 0"):
        LcSettings(rounds=0)
    with pytest.raises(SpecError, match="mu must be above 0"):
        LcSettings(mu=0)
    with pytest.raises(SpecError, match="ema must be 0"):
        found(model, training=TrainSettings(epochs=1, ema=0.9))
    with pytest.raises(SpecError, match="method 'lc' needs train"):
        found(model, train=None)
    with pytest.raises(PlanError, match="no layer 'conv2'"):
        search(nn.Sequential(nn.Conv2d(1, 8, 3)), space_of(model), budget=0.5, method="lc", train=tiny.batches()[0])
