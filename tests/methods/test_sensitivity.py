"""Candidates priced one by one by what the output loses."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from functools import cache
from itertools import product
from math import inf, isclose, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from haloc.errors import DataError, ModelError, SpecError
from haloc.factor.calibrate import calibrate
from haloc.factor.inspect import inspect
from haloc.factor.surgery import apply_plan
from haloc.forms import Dense, Tucker2
from haloc.methods.budget import limits_of
from haloc.methods.evidence import Evidence
from haloc.methods.search import search
from haloc.methods.sensitivity import METHOD, SensitivitySettings
from haloc.methods.task import Task
from haloc.methods.trials import Trials, examples
from haloc.space import Grid, LayerChoices, RankSpace, rank_space
from haloc.training.objective import cross_entropy, distillation
from tests.methods import tiny

SETTINGS = SensitivitySettings(images=100)


@cache
def model() -> nn.Module:
    torch.set_num_threads(1)
    return tiny.trained().eval()


@cache
def space() -> RankSpace:
    return rank_space(inspect(model(), tiny.IMAGE), forms=("tucker2", "spatial"), round_to=4, names=tiny.OPEN)


def task(**options: Any) -> Task:
    train, val = tiny.batches()
    given = {"space": space(), "train": train, "val": val} | options
    chosen = given.pop("space")
    return Task(given.pop("model", model()), chosen, limits_of(chosen, 0.5), **given)


@cache
def found() -> Evidence:
    return METHOD(task(), SETTINGS)


def logits(network: nn.Module, inputs: Tensor) -> Tensor:
    """What a network says with BatchNorm statistics of the batch."""
    network = copy.deepcopy(network)
    network.norm1.train()
    with torch.no_grad():
        return network(inputs)


def test_a_loss_is_the_mean_divergence_over_the_first_held_out_images():
    held = examples(task(), 100)
    assert sum(len(targets) for _, targets in held) == 100
    for name, form, temperature in (("conv2", 1, 4.0), ("conv3", 2, 4.0), ("conv4", 1, 1.0)):
        chosen = tuple(space().layers[name])[form]
        changed, expected = apply_plan(model(), {name: chosen}), 0.0
        for inputs, _ in held:
            said, wanted = ((logits(x, inputs) / temperature).softmax(1).double() for x in (changed, model()))
            expected += float((wanted * (wanted / said).log()).sum()) * temperature**2 / 100
        settings = SensitivitySettings(images=100, temperature=temperature)
        loss = METHOD(task(), settings).losses[name][form]
        assert isclose(loss, expected, rel_tol=1e-3)


def test_dense_loses_nothing_and_more_rank_loses_less():
    for name, row in found().losses.items():
        by_form = dict(zip(space().layers[name], row, strict=True))
        assert by_form[Dense()] == 0
        for family in ("tucker2", "spatial"):
            losses = [loss for form, loss in by_form.items() if form.name == family]
            assert losses[0] > 2 * losses[-1] > 0


def test_with_the_loss_as_the_measure_it_is_the_growth_of_the_cross_entropy():
    evidence = METHOD(task(), SensitivitySettings(images=100, measure="loss"))
    form, grown = tuple(space().layers["conv3"])[1], 0.0
    for inputs, targets in examples(task(), 100):
        after, before = (logits(x, inputs) for x in (apply_plan(model(), {"conv3": form}), model()))
        grown += float(cross_entropy(after, targets) - cross_entropy(before, targets)) * len(targets) / 100
    assert isclose(evidence.losses["conv3"][1], grown, rel_tol=1e-3)
    assert evidence.losses["conv3"][0] == 0


@pytest.mark.parametrize("share", [0.4, 0.55, 0.8])
def test_the_plan_is_the_best_by_brute_force(share):
    (limit,) = limits_of(space(), share)
    offers = {name: tuple(offer) for name, offer in space().open_layers.items()}
    rows = [list(zip(offers[name], found().losses[name], limit.prices.prices[name], strict=True)) for name in offers]
    affordable = [
        sum(loss for _, loss, _ in network)
        for network in product(*rows)
        if limit.prices.rest + sum(price for *_, price in network) <= limit.budget
    ]
    plan = found().plan((limit,))
    losses = [found().losses[name][offers[name].index(form)] for name, form in plan.items()]
    assert limit.holds(plan)
    assert isclose(sum(losses), min(affordable), rel_tol=1e-9)


def test_interrupted_and_resumed_is_as_if_nothing_had_happened(tmp_path):
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        METHOD(task(folder=tmp_path, on_step=interrupt), SETTINGS)
    file = tmp_path / "sensitivity.jsonl"
    before = file.read_text()
    assert 0 < len(before.splitlines()) - 1 < len(space().open_layers)
    with file.open("a") as torn:
        torn.write('{"step": ')
    steps: list[tuple[int, int]] = []
    again = METHOD(task(folder=tmp_path, on_step=lambda *step: steps.append(step)), SETTINGS)
    assert again.losses == found().losses
    assert len(steps) < steps[-1][1] == steps[-1][0]
    assert file.read_text().startswith(before)


@pytest.mark.parametrize("other", ["settings", "weights", "moments", "resume"])
def test_what_was_measured_on_something_else_is_not_used(tmp_path, caplog, other):
    METHOD(task(folder=tmp_path), SETTINGS)
    options: dict[str, Any] = {}
    if other == "weights":
        options["model"] = tiny.network(seed=5)
    if other == "moments":
        options["moments"] = calibrate(model(), tiny.batches()[0], tiny.OPEN)
    if other == "resume":
        options["resume"] = False
    settings = SensitivitySettings(images=70) if other == "settings" else SETTINGS
    again = METHOD(task(folder=tmp_path, **options), settings)
    assert again.losses == METHOD(task(**options), settings).losses
    assert ("not used" in caplog.text) == (other != "resume")
    assert len((tmp_path / "sensitivity.jsonl").read_text().splitlines()) == 1 + len(space().open_layers)


def test_somebody_elses_file_is_left_alone(tmp_path):
    (tmp_path / "sensitivity.jsonl").write_text("a diary\n")
    with pytest.raises(Exception, match="not the log of a run"):
        METHOD(task(folder=tmp_path), SETTINGS)
    assert (tmp_path / "sensitivity.jsonl").read_text() == "a diary\n"


def test_candidates_put_in_say_what_the_plan_applied_says():
    moments = calibrate(model(), tiny.batches()[0], tiny.OPEN)
    inputs = next(iter(tiny.batches()[1]))[0]
    trials = Trials(task(moments=moments))
    offers = {name: tuple(offer) for name, offer in space().open_layers.items()}
    for number in (1, 3, 0, 2):
        plan = {name: forms[number % len(forms)] for name, forms in offers.items()}
        trials.put(plan)
        assert torch.equal(trials.logits(inputs), apply_plan(model(), plan, moments=moments)(inputs))
    trials.forget("conv3")
    plan["conv3"] = Dense()
    assert torch.equal(trials.logits(inputs), apply_plan(model(), plan, moments=moments)(inputs))


def test_training_images_do_where_nothing_is_held_out():
    train, _ = tiny.batches()
    alone = METHOD(task(val=None), SETTINGS)
    assert alone.losses == METHOD(task(val=train), SETTINGS).losses != found().losses
    assert METHOD(task(train=None), SETTINGS).losses == found().losses
    with pytest.raises(SpecError, match="needs val or train"):
        METHOD(task(train=None, val=None), SETTINGS)


def test_a_batch_is_cut_to_the_number_of_images_and_there_may_be_fewer():
    held = examples(task(), 100)
    assert [len(targets) for _, targets in held] == [64, 36]
    assert sum(len(targets) for _, targets in examples(task(), 10**6)) % 64 == 0
    with pytest.raises(DataError, match="do not fill one batch"):
        examples(task(val=torch.utils.data.DataLoader([(torch.zeros(1, 8, 8), 0)], batch_size=2)), 5)


class Tokens(nn.Module):
    """Two named inputs, and the logits of every token in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(7, 12), nn.Linear(12, 12), nn.Linear(12, 7)

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.embed(ids) + self.mix(self.embed(ids)).relu() * mask[..., None])}


@pytest.mark.parametrize("measure", ["kl", "loss"])
def test_several_inputs_a_dict_of_outputs_and_logits_per_token(measure):
    torch.manual_seed(0)
    network = Tokens().requires_grad_(False)
    ids, labels = torch.randint(7, (6, 5)), torch.randint(7, (6, 5))
    batch = {"ids": ids, "mask": torch.ones(6, 5), "labels": labels}
    layers = inspect(network, {"ids": ids, "mask": torch.ones(6, 5)})
    grids = (Grid.of("svd", [(2,), (4,)]),)
    chosen = RankSpace({x.name: LayerChoices(x.calls, grids if x.name == "mix" else ()) for x in layers})
    evidence = METHOD(task(model=network, space=chosen, val=[batch]), SensitivitySettings(measure=measure))
    before = network(ids, torch.ones(6, 5))["logits"].flatten(0, 1)
    changed = apply_plan(network, {"mix": tuple(chosen.layers["mix"])[1]})
    after = changed(ids, torch.ones(6, 5))["logits"].flatten(0, 1)
    wanted = distillation(after, before, 4.0)
    if measure == "loss":
        wanted = cross_entropy(after, labels.flatten()) - cross_entropy(before, labels.flatten())
    assert isclose(evidence.losses["mix"][1], float(wanted), rel_tol=1e-4)


def test_an_output_that_is_no_logits_is_compared_as_it_is_and_has_no_cross_entropy():
    network = nn.Sequential(OrderedDict(layer=nn.Linear(12, 12), sum=nn.Flatten(0)))
    grids = (Grid.of("svd", [(2,)]),)
    chosen = RankSpace({"layer": LayerChoices(inspect(network, torch.zeros(2, 12))["layer"].calls, grids)})
    batches = [(torch.randn(2, 12), torch.zeros(2, dtype=torch.long))]
    changed = apply_plan(network, {"layer": tuple(chosen.layers["layer"])[1]})
    before, after = (x(batches[0][0]).detach() for x in (network, changed))
    losses = METHOD(task(model=network, space=chosen, val=batches), SETTINGS).losses["layer"]
    assert isclose(losses[1], float((after - before).square().sum() / before.square().sum()), rel_tol=1e-4)
    with pytest.raises(ModelError, match="expected logits"):
        METHOD(task(model=network, space=chosen, val=batches), SensitivitySettings(measure="loss"))


class Strict(nn.Module):
    """Talks nonsense once its layer is not what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, input: Tensor) -> Tensor:
        return self.layer(input) * (1 if isinstance(self.layer, nn.Linear) else nan)


def test_a_candidate_that_breaks_the_network_is_not_considered(tmp_path):
    network = Strict()
    grids = (Grid.of("svd", [(2,)]),)
    chosen = RankSpace({"layer": LayerChoices(inspect(network, torch.zeros(2, 12))["layer"].calls, grids)})
    batches = [(torch.ones(2, 12), torch.zeros(2, dtype=torch.long))]
    given = {"model": network, "space": chosen, "val": batches, "folder": tmp_path}
    assert METHOD(task(**given), SETTINGS).losses == {"layer": (0, inf)}
    assert METHOD(task(**given), SETTINGS).losses == {"layer": (0, inf)}  # from its notes


@pytest.mark.parametrize("wrong", [{"images": 0}, {"images": 2.5}, {"measure": "mse"}, {"temperature": 0}])
def test_settings_are_checked(wrong):
    with pytest.raises(SpecError, match=next(iter(wrong))):
        SensitivitySettings(**wrong)


def test_the_search_tells_how_far_it_is_and_what_it_was_told(tmp_path: Path):
    steps: list[tuple[int, int]] = []
    train, val = tiny.batches()
    result = search(
        model(), space(), budget=0.5, method="sensitivity", settings=SETTINGS, train=train, val=val,
        on_step=lambda *step: steps.append(step), folder=tmp_path,
    )  # fmt: skip
    total = 2 * sum(map(len, space().open_layers.values()))
    assert steps == [(number, total) for number in range(1, total + 1)]
    assert result.evidence.settings == {"images": 100, "measure": "kl", "temperature": 4.0}
    rows = [json.loads(line) for line in (tmp_path / "sensitivity.jsonl").read_text().splitlines()]
    assert [row.get("layer") for row in rows[1:]] == list(space().open_layers)
    assert all(isinstance(form, Tucker2 | Dense) or form.name == "spatial" for form in result.plan.values())
