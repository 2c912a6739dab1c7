"""Runs that narrow the network first: what comes out, what its shares are of, and what is done again."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

import haloc
from haloc.cost.machine import environment
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


CLOCK = {"images": 128, "tried": 64, "round_to": 4, "latency": "90%"}
TIMED = {
    "narrow": CLOCK,
    "budget": {"macs": "100%"},
    "target": "cpu:torch:b1",
    "table": {"networks": 4, "attempts": 1},
    "space": {"round_to": 8, "forms": ["svd"]},
    "reconstruct": {},
    "finetune": {"epochs": 0},
}


def cheap_channels(monkeypatch) -> None:
    """Clocks by which a layer takes what it has multiply-adds, and a network what its layers do, and a little."""

    def timed(names, build, example, *_):
        return {
            name: {"latency_ms": 1 + haloc.inspect(build(name), example).macs / 1e4, "iqr_ms": 0.01} for name in names
        }

    def measured(rows, target, *, path, on_progress):
        found = [
            haloc.Row(shape, form, latency_ms=haloc.Count("macs").price(shape, form).value / 1e4)
            for shape, form in rows
        ]
        table = haloc.Table(target, tuple(found), environment(target.to_dict()))
        table.save(path)
        on_progress(1, 1)
        return table

    monkeypatch.setattr("haloc.narrowing.timing.take_turns", timed)
    monkeypatch.setattr("haloc.narrowing.timing.measure", measured)


def test_widths_are_chosen_by_the_clock_of_the_target(tmp_path, monkeypatch):
    cheap_channels(monkeypatch)
    told, folder = Told(), tmp_path / "run"
    model, report = compress(folder, told, **TIMED)
    assert narrowed_of(model)
    outcome = read_json(folder / "narrow" / "outcome.json")
    assert 0.5 * outcome["dense_ms"] < outcome["latency_ms"] <= 0.9 * outcome["dense_ms"]
    assert outcome["error_ms"] > 0
    built = haloc.inspect(haloc.load(folder / "narrowed", make()), torch.zeros(1, 1, 8, 8))
    assert outcome["latency_ms"] == pytest.approx(1 + built.macs / 1e4, rel=0.05), "that of the network that was made"
    assert len(haloc.Table.load(folder / "narrow" / "table.json").rows) > 5
    timings = read_json(folder / "narrow" / "table.network.json")["timings"]
    assert len(timings) == len({timing["widths"]["3"] for timing in timings}) == 3, "two of the four drawn were alike"
    (point,) = [each for each in report.facts["prediction"]["points"] if each["name"] == "narrowed, by its widths"]
    assert point["predicted"] == pytest.approx(outcome["latency_ms"], rel=1e-6)
    (note,) = [note for note in report.facts["notes"] if "chosen by the target's clock" in note]
    assert f"{outcome['latency_ms'] / outcome['dense_ms']:.1%} of the dense" in note
    compress(folder, again := Told(), **TIMED)
    assert not again.begun
    monkeypatch.setattr("haloc.narrowing.timing.take_turns", lambda *_: pytest.fail("these were timed before"))
    compress(folder, again, **TIMED | {"narrow": CLOCK | {"latency": "80%"}})
    assert again.begun[0] == "narrow"
    tighter = read_json(folder / "narrow" / "outcome.json")
    assert tighter["latency_ms"] <= 0.8 * tighter["dense_ms"]


def test_another_target_is_measured_anew(tmp_path, monkeypatch):
    cheap_channels(monkeypatch)
    compress(tmp_path / "run", **TIMED)
    compress(tmp_path / "run", **TIMED | {"target": "cpu:torch:b2"})
    assert str(haloc.Table.load(tmp_path / "run" / "narrow" / "table.json").target) == "cpu:eager:fp32:b2"
    _, report = compress(tmp_path / "run", **TIMED | {"narrow": NARROW})
    assert not any("clock" in note for note in report.facts["notes"]), "no widths were chosen by it this time"


def test_stopped_while_widths_are_measured_it_goes_on(tmp_path):
    class StopError(Exception):
        pass

    class Stopping(Told):
        @contextmanager
        def steps(self, what):
            def step(done, total):
                self.notes.append(what)
                if self.limit and "widths" in what and done > self.limit:
                    raise StopError

            yield step

    told = Stopping()
    told.limit = 12
    with pytest.raises(StopError):
        compress(tmp_path / "run", told, **TIMED | {"narrow": CLOCK | {"latency": "1000 ms"}})
    whole, told.limit, told.notes = len([what for what in told.notes if "widths" in what]), 0, []
    compress(tmp_path / "run", told, **TIMED | {"narrow": CLOCK | {"latency": "1000 ms"}})
    rows = haloc.Table.load(tmp_path / "run" / "narrow" / "table.json").rows
    visits = 2 * (len(rows) + 4)
    assert len([what for what in told.notes if "widths" in what]) <= visits - whole + 1


def test_a_chip_that_is_modelled_tells_of_widths_too(tmp_path):
    told = {"budget": {"latency": "95%"}, "target": "eyeriss", "narrow": CLOCK | {"latency": "95%"}, "table": {}}
    model, report = compress(tmp_path / "run", **TIMED | told)
    assert narrowed_of(model)
    assert not (tmp_path / "run" / "narrow" / "table.network.json").exists()
    row = next(row for row in report.facts["figures"] if row["key"] == "latency")
    outcome = read_json(tmp_path / "run" / "narrow" / "outcome.json")
    assert outcome["dense_ms"] == pytest.approx(row["before"], rel=1e-3)


def test_mistakes_with_clocks_are_told_before_anything_is_written(tmp_path):
    with pytest.raises(SpecError, match=r"a budget of narrow\.latency needs a target"):
        compress(tmp_path / "run", narrow=CLOCK)
    with pytest.raises(SpecError, match="'4 s' cannot be, latency is in ms"):
        compress(tmp_path / "run", **TIMED | {"narrow": CLOCK | {"latency": "4 s"}})
    with pytest.raises(SpecError, match="a budget is a share such as '60%'"):
        compress(tmp_path / "run", **TIMED | {"narrow": CLOCK | {"latency": "fast"}})
    if not torch.cuda.is_available():
        with pytest.raises(SpecError, match="needs a CUDA device"):
            compress(tmp_path / "run", **TIMED | {"target": "cuda:compile:fp16:b128:nhwc"})
    elsewhere = haloc.Table(haloc.Target.parse("cpu:torch:b1"), (), {"device": "another"})
    elsewhere.save(tmp_path / "elsewhere.json")
    with pytest.raises(SpecError, match="was measured with device 'another'"):
        compress(tmp_path / "run", **TIMED | {"table": {"table": str(tmp_path / "elsewhere.json")}})
    assert not (tmp_path / "run").exists()


def test_mistakes_are_told(tmp_path):
    with pytest.raises(BudgetError, match="narrowing alone cannot reach"):
        compress(tmp_path / "a", narrow={"macs": "1%"})
    with pytest.raises(SpecError, match="a budget is a share such as '60%'"):
        compress(tmp_path / "d", narrow={"macs": "half"})
    assert not (tmp_path / "d").exists(), "refused before anything is written"
    with pytest.raises(SpecError, match="only macs, params"):
        compress(tmp_path / "b", narrow={"energy": "50%"})
    with pytest.raises(SpecError, match=r"narrow\.round_to must be 1 or more"):
        compress(tmp_path / "c", narrow={"macs": "80%", "round_to": 0})
    with pytest.raises(SpecError, match="narrowed by what it says to training images"):
        haloc.compress(trained(), torch.zeros(1, 1, 8, 8), budget="50%", narrow={"macs": "80%"}, search="energy")
