"""What every method has in common: it keeps to the budget, leaves the model alone, and does the same again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import cache
from importlib.util import find_spec
from math import inf
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import nn

from haloc.cost.count import Count
from haloc.errors import BudgetError, SpecError
from haloc.factor.inspect import inspect
from haloc.factor.surgery import apply_plan
from haloc.methods.evidence import Evidence
from haloc.methods.search import METHODS, SearchResult, method_of, search, solve
from haloc.methods.task import Method, Task
from haloc.plan import Plan
from haloc.space import LayerChoices, RankSpace
from haloc.training.settings import TrainSettings
from tests.methods import tiny

#: Settings with which a method takes a second here; methods that are not in it are run with their defaults.
SETTINGS: dict[str, Callable[[], Any]] = {
    "haloc": lambda: _settings("haloc", "SearchSettings", warmup_epochs=0, alpha_lr=0.05),
    "lc": lambda: _settings("lc", "LcSettings", rounds=3),
    "sensitivity": lambda: _settings("sensitivity", "SensitivitySettings", images=64),
    "genetic": lambda: _settings("genetic", "GeneticSettings", population=6, generations=3, images=64),
}
TRAINING = TrainSettings(epochs=1, lr=0.01, warmup_epochs=0, seed=3)
SHARES = (0.35, 0.5, 0.7, 0.9, 1.0)


def _settings(module: str, name: str, **options: Any) -> Any:
    return getattr(__import__(f"haloc.methods.{module}", fromlist=[name]), name)(**options)


@pytest.fixture(params=METHODS)
def name(request) -> str:
    if find_spec(f"haloc.methods.{request.param}") is None:
        pytest.skip(f"there is no haloc.methods.{request.param} yet")
    return request.param


@cache
def model() -> nn.Module:
    torch.set_num_threads(1)
    return tiny.trained()


def found(name: str, model: nn.Module, budget: Any = 0.5, **options: Any) -> SearchResult:
    """Searches with all that the method needs, and nothing else."""
    method = method_of(name)
    data = dict(zip(("train", "val"), tiny.batches(), strict=True))
    needs = [need.split("|")[-1] for need in method.needs]  # of either the one that is asked for last
    given = {need: data[need] for need in needs} | ({"training": TRAINING} if method.trains else {})
    if name in SETTINGS:
        given["settings"] = SETTINGS[name]()
    return search(model, tiny.rank_space_of(model), budget=budget, method=name, **given | options)


@cache
def result(name: str) -> SearchResult:
    """One search per method, for all tests that only look at what came out."""
    return found(name, model())


def told(result: SearchResult) -> dict[str, Any]:
    """What must not change from run to run."""
    seen = [(plan.to_dict(), loss) for plan, loss in result.evidence.seen]
    losses = {name: list(row) for name, row in result.evidence.losses.items()}
    return {"plan": result.plan.to_dict(), "losses": losses, "seen": seen}


def found_elsewhere(name: str, weights: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    return told(found(name, tiny.restored(weights)))


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Executor]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("weights") / "digits.pt"
    torch.save(model().state_dict(), path)
    return str(path)


def own_loss(evidence: Evidence, plan: Plan) -> float:
    """What the method's own rule makes least."""
    if evidence.rule == "seen":
        return min(loss for other, loss in evidence.seen if other == plan)
    offers = evidence.space.open_layers
    losses = [evidence.losses[name][tuple(offer).index(plan[name])] for name, offer in offers.items()]
    return sum(losses) if evidence.rule == "sum" else max(losses)


def outcome(evidence: Evidence, budget: Any, cost: Any = None) -> Plan | dict[str, float]:
    """The plan; or what can be reached, as methods that judge whole networks know no others than they saw."""
    try:
        return solve(evidence, budget, cost).plan
    except BudgetError as error:
        return error.reachable


def state(model: nn.Module) -> dict[str, Any]:
    """All of a model that a method might change."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = dict(model.named_modules())
    return {
        "modules": {name: type(module) for name, module in modules.items()},
        "modes": {name: module.training for name, module in modules.items()},
        "hooks": {name: [len(getattr(module, kind)) for kind in hooks] for name, module in modules.items()},
        "asks": {name: (p.requires_grad, p.grad is None) for name, p in model.named_parameters()},
        "values": {name: value.clone() for name, value in model.state_dict().items()},
    }


def test_the_budget_is_met(name):
    (row,) = result(name).spending
    assert row.cost <= row.budget == 0.5 * row.dense
    assert inspect(apply_plan(model(), result(name).plan), tiny.IMAGE).macs == row.cost


def test_the_plan_has_a_form_on_offer_for_every_open_layer_and_runs(name):
    plan = result(name).plan
    assert list(plan) == list(tiny.OPEN)
    assert all(form in tiny.rank_space_of(model()).layers[layer] for layer, form in plan.items())
    assert apply_plan(model(), plan)(tiny.IMAGE).shape == (1, 10)


def test_what_was_found_is_of_the_space_and_says_whose_it_is(name):
    evidence = result(name).evidence
    assert evidence.method == name
    assert evidence.finished
    offers = tiny.rank_space_of(model()).open_layers
    if evidence.rule == "seen":
        assert evidence.seen
    else:
        assert {layer: len(row) for layer, row in evidence.losses.items()} == {x: len(y) for x, y in offers.items()}
        assert all(min(row) < inf for row in evidence.losses.values())


def test_another_process_finds_the_same(name, elsewhere, weights):
    assert elsewhere.submit(found_elsewhere, name, weights).result() == told(result(name))


def test_more_budget_is_never_worse(name):
    evidence = result(name).evidence
    plans = [plan for plan in (outcome(evidence, share) for share in SHARES) if isinstance(plan, Plan)]
    losses = [own_loss(evidence, plan) for plan in plans]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) >= 3


@pytest.mark.parametrize("cost", [None, Count("params"), Count("bytes")], ids=["macs", "params", "bytes"])
def test_the_file_gives_the_same_plans_for_other_budgets_and_costs(name, cost, tmp_path):
    evidence = result(name).evidence
    evidence.save(tmp_path / "found.json")
    again = Evidence.load(tmp_path / "found.json")
    for share in SHARES:
        assert outcome(again, share, cost) == outcome(evidence, share, cost)
    assert cost is not None or outcome(again, 0.5) == result(name).plan


def test_the_model_is_left_as_it_was(name):
    given = copy.deepcopy(model()).train()
    given.conv3.eval()
    given.conv1.weight.requires_grad_(False)
    before = state(given)
    found(name, given)
    after = state(given)
    assert {key: value for key, value in after.items() if key != "values"} == {
        key: value for key, value in before.items() if key != "values"
    }
    assert all(torch.equal(value, before["values"][key]) for key, value in after["values"].items())


def test_a_budget_that_cannot_be_reached_is_refused_before_anything_is_done(name):
    steps: list[Any] = []
    with pytest.raises(BudgetError) as caught:
        found(name, model(), 0.01, on_step=lambda *step: steps.append(step), on_progress=steps.append)
    assert not steps
    least = caught.value.reachable["macs"]
    assert found(name, model(), least).spending[0].cost == least


def test_several_budgets_are_met_at_once(name):
    rows = found(name, model(), {"macs": "50%", "params": "65%", "bytes": "90%"}).spending
    assert [row.quantity for row in rows] == ["macs", "params", "bytes"]
    assert all(row.cost <= row.budget for row in rows)


def test_settings_of_another_kind_are_refused(name):
    with pytest.raises(SpecError, match=f"method '{name}' (has no settings|takes \\w+ as its settings), got"):
        found(name, model(), settings=TRAINING)


def test_missing_data_are_named(name):
    for need in method_of(name).needs:
        with pytest.raises(SpecError, match=f"method '{name}' needs {need.replace('|', ' or ')}"):
            found(name, model(), **dict.fromkeys(need.split("|")))


def test_it_tells_how_far_it_is(name):
    steps: list[tuple[int, int]] = []
    training: list[Any] = []
    found(name, model(), on_step=lambda done, total: steps.append((done, total)), on_progress=training.append)
    assert bool(training) == method_of(name).trains
    if not training:
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1] > 0


def test_unknown_methods_are_refused():
    with pytest.raises(SpecError, match=r"unknown method 'halo', expected one of haloc.*Did you mean 'haloc'"):
        search(model(), tiny.rank_space_of(model()), budget=0.5, method="halo")


def test_a_method_of_ones_own_will_do_and_a_space_without_choices_will_not():
    def dearest(task: Task) -> Evidence:
        return Evidence("own", task.space, {name: [0.0] * len(offer) for name, offer in task.space.open_layers.items()})

    space = tiny.rank_space_of(model())
    assert search(model(), space, budget=1.0, method=Method("own", "", dearest)).evidence.method == "own"
    closed = RankSpace({name: LayerChoices(offer.calls) for name, offer in space.layers.items()})
    with pytest.raises(SpecError, match="nothing to choose from"):
        search(model(), closed, budget=1.0, method="uniform")
