from __future__ import annotations

import pytest
import torch

import haloc
from haloc.cost.model import Estimate
from haloc.cost.network import NetworkTimings, Timing
from haloc.cost.table import Row, Table
from haloc.cost.target import Target
from haloc.errors import SpecError
from haloc.files import read_json
from haloc.forms import macs
from haloc.forms import stages as stages_of
from haloc.pipeline import choose as choosing
from haloc.pipeline import deliver, stages
from haloc.pipeline.recipe import TargetPart
from haloc.plan import Plan
from tests.pipeline.small import Told, compress, trained


def table_of(rows, target):
    """A machine on which time goes with multiply-adds, and every stage takes a little to start."""
    costs = {(shape, form): 1e-5 * macs(shape, form) + 0.01 * len(stages_of(shape, form)) for shape, form in rows}
    return Table(target, tuple(Row(*key, latency) for key, latency in costs.items()), {"device": "made up"})


TARGET = Target("cpu", runtime="onnxruntime", batch_size=2)


@pytest.fixture
def clock(monkeypatch):
    """A machine on which a network takes as long as its layers do, times what the clock is told."""
    told = {"factor": 1.0, "timed": []}

    def measure(rows, target, *, path, on_progress=None):
        table_of(rows, target).save(path)

    def timed(model, example, plans, target, *, path=None, on_progress=None):
        layers = haloc.inspect(model, example)
        rows = table_of(haloc.rank_space(layers, forms=("tucker2", "svd"), round_to=4).rows(), target)
        factors = {name: told["factor"] if plan.changes() and path is None else 1.0 for name, plan in plans.items()}
        timings = tuple(
            Timing(plan, factors[name] * haloc.layers_cost(layers, plan, rows).value) for name, plan in plans.items()
        )
        told["timed"].append(list(plans))
        found = NetworkTimings(target, timings, {})
        if path is not None:
            found.save(path)
        return found

    monkeypatch.setattr(stages, "measure", measure)
    monkeypatch.setattr(stages, "time_networks", timed)
    monkeypatch.setattr(choosing, "time_networks", timed)
    monkeypatch.setattr(deliver, "time_models", lambda models, *_: dict.fromkeys(models, Estimate(1.0)))
    return told


def run(folder, budget="60%", **more):
    return compress(folder, told := Told(), budget={"latency": budget}, target=str(TARGET), **more), told


def checks(folder):
    return read_json(folder / "search/checks.json")["checks"]


def test_a_plan_that_keeps_its_budget_is_timed_once(tmp_path, clock):
    run(tmp_path / "run")
    (check,) = checks(tmp_path / "run")
    assert check["latency_ms"] <= check["allowed_ms"] == pytest.approx(0.6 * check["dense_ms"])
    assert clock["timed"][-1] == ["dense", "plan"]


def test_a_plan_that_is_slower_than_predicted_is_chosen_again(tmp_path, clock):
    run(tmp_path / "first", "70%")
    (promise,) = checks(tmp_path / "first")
    clock["factor"] = 1.02 * promise["allowed_ms"] / promise["latency_ms"]
    _, told = run(tmp_path / "run", "70%")
    first, *_, last = checks(tmp_path / "run")
    assert first["latency_ms"] > first["allowed_ms"]
    assert last["latency_ms"] <= last["allowed_ms"]
    assert last["plan"] != first["plan"]
    plan = Plan.load(tmp_path / "run/plan.json")
    assert dict(plan.to_dict()["layers"].items()) == last["plan"]
    assert any("is over its budget" in note for note in told.notes)


def test_a_plan_that_keeps_its_budget_by_less_than_the_spread_is_chosen_again():
    near = choosing.Check(Plan({}), 9.0, latency_ms=9.9, error_ms=0.2, dense_ms=20.0, allowed_ms=10.0)
    assert not near.holds
    assert choosing.Check(Plan({}), 9.0, 9.7, 0.2, 20.0, 10.0).holds
    assert not choosing.Check(Plan({}), 9.0, 9.7, 0.2, 20.0, 10.0, margin=0.05).holds
    assert choosing.Check(Plan({}), 9.0, 9.2, 0.2, 20.0, 10.0, margin=0.05).holds


@pytest.mark.parametrize("margin", [-0.1, 1.0])
def test_a_margin_is_a_share(margin):
    with pytest.raises(SpecError, match="target.margin is a share from 0 to below 1"):
        TargetPart(margin=margin)


def test_what_cannot_be_kept_is_tried_a_few_times_and_told(tmp_path, clock):
    clock["factor"] = 50.0
    run(tmp_path / "run")
    assert 1 <= len(checks(tmp_path / "run")) <= 3
    best = min(checks(tmp_path / "run"), key=lambda check: check["latency_ms"])
    assert Plan.load(tmp_path / "run/plan.json").to_dict()["layers"] == best["plan"]


def test_an_amount_is_held_against_the_clock_itself(tmp_path, clock):
    layers = haloc.inspect(trained(), torch.zeros(1, 1, 8, 8))
    space = haloc.rank_space(layers, forms=("tucker2", "svd"), round_to=4)
    dense = haloc.layers_cost(layers, {}, table_of(space.rows(), TARGET)).value
    run(tmp_path / "run", f"{0.7 * dense!r} ms")
    assert checks(tmp_path / "run")[-1]["allowed_ms"] == pytest.approx(0.7 * dense)


def test_counted_budgets_need_no_clock(tmp_path, clock):
    compress(tmp_path / "run", target=str(TARGET))
    assert not (tmp_path / "run/search/checks.json").exists()
