"""Runs that narrow the network first: what comes out, what its shares are of, and what is done again."""

from __future__ import annotations

import pytest
import torch

import haloc
from haloc.errors import BudgetError, SpecError
from haloc.files import read_json
from haloc.narrowing import narrowed_of
from tests.pipeline.conftest import shorten
from tests.pipeline.small import Told, batches, compress, make, trained

NARROW = {"macs": "75%", "images": 128, "tried": 64, "round_to": 4}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("narrowed") / "run"
    return compress(folder, narrow=NARROW), folder


def test_shares_are_of_the_network_as_it_was(finished):
    (model, report), folder = finished
    figures = {row["key"]: row for row in report.facts["figures"]}
    dense = haloc.inspect(trained(), torch.zeros(1, 1, 8, 8))
    assert figures["macs"]["before"] == dense.macs
    assert figures["params"]["before"] == dense.params
    assert figures["macs"]["budget"] == pytest.approx(0.5 * dense.macs)
    assert figures["macs"]["after"] == haloc.inspect(model, torch.zeros(1, 1, 8, 8)).macs <= 0.5 * dense.macs
    assert figures["macs"]["after"] > 0.3 * dense.macs, "the budget is made use of"
    assert figures["params"]["after"] == sum(parameter.numel() for parameter in model.parameters())
    assert figures["score"]["after"] > 85
    (spent,) = report.facts["search"]["budgets"]
    assert spent["dense"] == report.facts["pareto"]["dense"] == pytest.approx(dense.macs)
    assert spent["remains"] == pytest.approx(figures["macs"]["remains"])
    assert report.met
    narrowed = haloc.load(folder / "narrowed", make())
    assert haloc.inspect(narrowed, torch.zeros(1, 1, 8, 8)).macs <= 0.75 * dense.macs


def test_the_report_tells_of_it(finished):
    (_, report), folder = finished
    names = [row["name"] for row in report.facts["variants"]]
    assert names[:3] == ["dense", "narrowed", "factorised"]
    scores = [row["score"] for row in report.facts["variants"][:2]]
    assert scores[1] == pytest.approx(scores[0], abs=15)
    (consumer,) = [each.hidden.consumer for each in narrowed_of(haloc.load(folder / "model", make()))]
    row = next(row for row in report.facts["layers"] if row["name"] == consumer)
    assert row["form"].startswith("narrowed")
    assert row["width"].endswith("→16")
    assert row["shape"].startswith("16→16")
    page = report.page.read_text()
    assert row["width"] in page
    assert "narrowed" in page


def test_the_network_is_loaded_by_the_model_that_it_was(finished):
    (model, _), folder = finished
    loaded = haloc.load(folder / "model", make())
    images = next(iter(batches("test", limit=64)))[0]
    assert torch.equal(loaded(images), model(images))


def test_nothing_is_done_twice_and_another_share_is_done_again(finished):
    told = Told()
    _, folder = finished
    compress(folder, told, narrow=NARROW)
    assert not told.begun
    compress(folder, told, narrow=NARROW | {"macs": "80%"})
    assert told.begun[:3] == ["narrow", "inspect", "space"]
    assert haloc.inspect(haloc.load(folder / "narrowed", make()), torch.zeros(1, 1, 8, 8)).macs > 0
    compress(folder, narrow=NARROW)


def test_ranks_need_not_be_chosen_where_narrowing_is_enough(tmp_path):
    told = Told()
    model, report = compress(tmp_path / "run", told, narrow=NARROW, budget={"macs": "80%"})
    assert report.met
    assert report.facts["search"]["method"] == "none"
    assert "no ranks were chosen" in report.page.read_text()
    assert not haloc.Plan.load(tmp_path / "run" / "plan.json").changes()
    assert narrowed_of(model)


def test_shares_of_latency_are_of_the_original_too(tmp_path, monkeypatch):
    shorten(monkeypatch)
    times = {"dense": haloc.Estimate(10.0), "narrowed": haloc.Estimate(8.0)}
    monkeypatch.setattr("haloc.pipeline.stages.time_models", lambda *_: times)
    told = {"budget": {"latency": "95%"}, "target": "cpu:torch:b4", "table": {"networks": 2, "attempts": 1}}
    model, report = compress(tmp_path / "run", narrow=NARROW, export={"formats": ["pt2"], "samples": 16}, **told)
    assert read_json(tmp_path / "run" / "table.narrowed.json") == {"latency": 0.8}
    row = next(row for row in report.facts["figures"] if row["key"] == "latency")
    assert row["budget"] == pytest.approx(0.95 * row["before"], rel=1e-6)
    assert report.facts["search"]["method"] == "none", "95% of the original are more than the 80% that are left"
    assert narrowed_of(model)


def test_energy_on_a_modelled_chip_is_of_the_original(tmp_path):
    told = {"budget": {"energy": "70%"}, "target": "eyeriss"}
    runs = {name: compress(tmp_path / name, narrow=part, **told) for name, part in (("with", NARROW), ("without", {}))}
    rows = {name: next(r for r in run.report.facts["figures"] if r["key"] == "energy") for name, run in runs.items()}
    assert rows["with"]["before"] == pytest.approx(rows["without"]["before"], rel=1e-6)
    assert rows["with"]["budget"] == pytest.approx(rows["without"]["budget"], rel=1e-6)
    assert rows["with"]["after"] <= rows["with"]["budget"]
    assert narrowed_of(runs["with"].model)


def test_mistakes_are_told(tmp_path):
    with pytest.raises(BudgetError, match="narrowing alone cannot reach"):
        compress(tmp_path / "a", narrow={"macs": "1%"})
    with pytest.raises(SpecError, match="a budget is a share such as '60%'"):
        compress(tmp_path / "d", narrow={"macs": "half"})
    assert not (tmp_path / "d").exists(), "refused before anything is written"
    with pytest.raises(SpecError, match="only macs, params"):
        compress(tmp_path / "b", narrow={"latency": "50%"})
    with pytest.raises(SpecError, match=r"narrow\.round_to must be 1 or more"):
        compress(tmp_path / "c", narrow={"macs": "80%", "round_to": 0})
    with pytest.raises(SpecError, match="narrowed by what it says to training images"):
        haloc.compress(trained(), torch.zeros(1, 1, 8, 8), budget="50%", narrow={"macs": "80%"}, search="energy")
