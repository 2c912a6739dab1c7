"""What `benchmarks/imagenet` measures of speed: which networks, what is kept of them, and what its sheet says."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import haloc
from haloc.files import read_json, write_json
from haloc.narrowing import Narrowed
from haloc.plan import Plan

FOLDER = Path(__file__).parents[1] / "benchmarks" / "imagenet"


@pytest.fixture
def script(monkeypatch):
    """Scripts of the folder as modules, each under a name of its own: other folders have a show.py, too."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"imagenet_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def narrowed(tmp_path):
    """Three groups of resnet20's channels, half of them left."""
    hidden = haloc.hidden_channels(haloc.create("resnet20"), torch.randn(1, 3, 32, 32))[:3]
    path = tmp_path / "half.narrowed.json"
    write_json(path, {"narrowed": [Narrowed(group, group.width // 2).to_dict() for group in hidden]})
    return path


def started(script, monkeypatch, *words) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *map(str, words)])
    script.main()


def test_narrowed_networks_are_predicted_from_networks_between(script, narrowed, hurried, monkeypatch, tmp_path):
    clock, output, seen = script("clock"), tmp_path / "speed.json", []
    real = haloc.time_models

    def watched(models, *rest):
        seen.append([sum(p.numel() for p in model.parameters()) for model in models.values()])
        return real(models, *rest)

    monkeypatch.setattr(haloc, "time_models", watched, raising=False)
    how = ("--classes", 10, "--size", 32, "--networks", 4, "--repeats", 2, "--output", output)
    started(clock, monkeypatch, "resnet20", narrowed, "--targets", "cpu:b1", *how)
    between, *turns = seen
    (dense, final), again = turns
    assert again == [dense, final]
    assert len(between) == 4
    assert between[0] == dense
    assert all(final < params < dense for params in between[1:])
    (row,) = read_json(output)["rows"]
    assert (row["network"], row["plan"], row["size"], row["target"]) == ("resnet20", "half", 32, "cpu:b1")
    assert [len(row["latency_ms"][key]) for key in ("dense", "plan")] == [2, 2]
    assert row["latency_ms"]["plan"][0] > 0 < row["measured_ms"]["plan"][0]


def test_folders_with_ranks_and_narrowed_channels_are_made_in_parts(script, narrowed, tmp_path):
    clock = script("clock")
    model, image = haloc.create("resnet20"), torch.randn(1, 3, 32, 32)
    plan = Plan({"layer3.0.conv1": haloc.Tucker2(16, 16), "layer3.1.conv1": haloc.Dense()})
    small = clock.made(model, [*clock.changes_of(narrowed), *plan.changes().items()])
    haloc.save(tmp_path / "saved", haloc.apply_plan(haloc.narrowing.resized(model, clock.changes_of(narrowed)), plan))
    changes = clock.changes_of(tmp_path / "saved")
    assert changes == (*clock.changes_of(narrowed), ("layer3.0.conv1", haloc.Tucker2(16, 16)))
    sizes = [haloc.inspect(each, image).params for each in clock.between(model, changes, 6)]
    assert len(sizes) == 6
    assert sizes[0] == haloc.inspect(model, image).params
    assert min(sizes) > haloc.inspect(small, image).params


def test_the_model_of_a_chip_needs_no_clock(script, narrowed, monkeypatch, tmp_path):
    clock, output = script("clock"), tmp_path / "speed.json"
    monkeypatch.setattr(haloc, "measure", lambda rows, target: real(rows, target, engine="bound"), raising=False)
    from haloc.cost.measure import measure as real

    how = ("--classes", 10, "--size", 32, "--output", output)
    for _ in range(2):  # rows of the same network are replaced
        started(clock, monkeypatch, "resnet20", narrowed, "--targets", "eyeriss", *how)
    (row,) = read_json(output)["rows"]
    assert row["latency_ms"]["plan"][0] < row["latency_ms"]["dense"][0]
    assert "measured_ms" not in row


def test_a_target_that_fails_is_said_and_the_others_go_on(script, narrowed, hurried, monkeypatch, tmp_path, capsys):
    clock, output = script("clock"), tmp_path / "speed.json"
    how = ("--classes", 10, "--size", 32, "--networks", 2, "--repeats", 1, "--output", output)
    with pytest.raises(SystemExit) as stopped:
        started(clock, monkeypatch, "resnet20", narrowed, "--targets", "cpu:fp99:b1", "cpu:b1", *how)
    assert stopped.value.code == 1
    said = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert len(said) == 1
    assert said[0].startswith("cpu:fp99:b1 FAILED")
    assert [row["target"] for row in read_json(output)["rows"]] == ["cpu:b1"]


def test_plans_are_predicted_from_one_table_of_their_rows(script, monkeypatch, tmp_path, capsys):
    speed, said = script("speed"), []

    def haloc(*words):
        said.append(words)
        if words[0] == "measure":
            return ""
        number = float(len(said))
        pair = {"dense": [9.0, 0.1], "plan": [number, 0.1]}
        return json.dumps({"latency_ms": pair, "measured_ms": pair, "macs": {}})

    monkeypatch.setattr(speed, "haloc", haloc)
    output = tmp_path / "speed.json"
    write_json(output, {"device": "a chip", "rows": []})
    how = ("--work", tmp_path / "work", "--output", output, "--repeats", 3)
    started(speed, monkeypatch, "resnet18", "cuda:graph:fp32:b128", *how)
    measure, *predictions = said
    assert measure.count("--plan") == 3
    assert {words[words.index("--table") + 1] for words in predictions} == {measure[measure.index("--output") + 1]}
    assert len(predictions) == 3 * 3
    found = read_json(output)
    assert found["device"] == "a chip"
    assert [row["plan"] for row in found["rows"]] == list(speed.PLANS["resnet18"])
    assert found["rows"][0]["latency_ms"]["plan"] == [2.0, 0.1]
    assert found["rows"][0]["measured_ms"]["plan"] == [3.0]


def test_a_verb_that_fails_fails_its_target_alone(script, monkeypatch, tmp_path, capsys):
    speed = script("speed")

    def rows_of(network, target, options):
        if target == "cpu:b2":
            speed.haloc("measure", "--no-such-option")
        yield {"network": network, "plan": "some", "target": target, "size": options.size}

    monkeypatch.setattr(speed, "rows_of", rows_of)
    how = ("--work", tmp_path / "work", "--output", tmp_path / "speed.json")
    with pytest.raises(SystemExit):
        started(speed, monkeypatch, "resnet18", "cpu:b2", "cpu:b1", *how)
    assert "cpu:b2 FAILED" in capsys.readouterr().out
    assert [row["target"] for row in read_json(tmp_path / "speed.json")["rows"]] == ["cpu:b1"]


def test_rows_are_replaced_in_their_places(script, tmp_path):
    kept, path = script("kept"), tmp_path / "speed.json"
    rows = [{"network": "a", "plan": plan, "target": "cpu", "size": 224, "figure": 1} for plan in "xyz"]
    kept.keep(path, rows)
    kept.keep(path, [rows[1] | {"figure": 2}, rows[0] | {"size": 64}])
    found = [(row["plan"], row["size"], row["figure"]) for row in read_json(path)["rows"]]
    assert found == [("x", 224, 1), ("y", 224, 2), ("z", 224, 1), ("x", 64, 1)]


@pytest.mark.parametrize(("said", "ahead", "verdict"), [(10.4, "+4.0%", "held"), (9.4, "-6.0%", "MISSED")])
def test_the_sheet_holds_predictions_of_narrowed_networks_against_the_clock(
    script, monkeypatch, tmp_path, said, ahead, verdict
):
    show = script("show")
    row = {"network": "mobilenet_v2", "size": 224, "target": "cuda:graph:fp32:b128", "plan": "mobilenet_v2-narrow-85"}
    row |= {"latency_ms": {"dense": [12.0, 0.3], "plan": [said, 0.3]}}
    row |= {"measured_ms": {"dense": [12.0], "plan": [10.0]}}
    write_json(tmp_path / "narrowed.json", {"rows": [row]})
    monkeypatch.setattr(show, "SPEED", tmp_path)
    (cells,) = show.speed()
    assert cells[-2:] == (ahead, f"predicted within 5%: {verdict}")
