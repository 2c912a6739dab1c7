"""What `benchmarks/imagenet` measures of speed: which networks, what is kept of them, and what its sheet says."""

from __future__ import annotations

import importlib.util
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


def test_networks_are_predicted_from_others_between_and_take_turns(script, narrowed, hurried, monkeypatch, tmp_path):
    speed, output, seen = script("speed"), tmp_path / "speed.json", []
    real = haloc.time_models

    def watched(models, *rest):
        seen.append([sum(p.numel() for p in model.parameters()) for model in models.values()])
        return real(models, *rest)

    monkeypatch.setattr(haloc, "time_models", watched, raising=False)
    plan = tmp_path / "ranks.json"
    Plan({f"layer3.{block}.conv1": haloc.Tucker2(16, 16) for block in range(3)}).save(plan)
    how = ("--classes", 10, "--size", 32, "--networks", 3, "--output", output)
    started(speed, monkeypatch, "resnet20", narrowed, plan, "--targets", "cpu:b1", *how)
    ((dense, *between, half, ranks),) = seen
    assert len(between) == 2 * 2
    assert all(half < params < dense for params in between[:2])
    assert all(ranks < params < dense for params in between[2:])
    rows = read_json(output)["rows"]
    assert [(row["network"], row["plan"], row["size"], row["target"]) for row in rows] == [
        ("resnet20", "half", 32, "cpu:b1"),
        ("resnet20", "ranks", 32, "cpu:b1"),
    ]
    assert [len(rows[0]["latency_ms"][key]) for key in ("dense", "plan")] == [2, 2]
    assert rows[0]["measured_ms"]["dense"] == rows[1]["measured_ms"]["dense"]
    assert all(row["latency_ms"]["plan"][0] > 0 < row["measured_ms"]["plan"][0] for row in rows)


def test_ranks_are_priced_as_chains(script, tmp_path):
    speed = script("speed")
    model, image = haloc.create("resnet20"), torch.randn(1, 3, 32, 32)
    form = haloc.Tucker2(16, 16)
    made = speed.Made.of(model, [("layer3.0.conv1", form)], image)
    priced = [each for _, each in haloc.cost.plans.plan_rows(made.layers, [made.plan])]
    assert priced.count(form) == 1
    plain = speed.Made.of(model, (), image)

    class Ones:
        unit = "ms"

        def price(self, shape, form):
            return haloc.Estimate(1.0)

    assert made.features(Ones())[1:] == [len(plain.layers), plain.features(Ones())[2] + 2]


def test_folders_with_ranks_and_narrowed_channels_are_made_in_parts(script, narrowed, tmp_path):
    speed = script("speed")
    model, image = haloc.create("resnet20"), torch.randn(1, 3, 32, 32)
    plan = Plan({"layer3.0.conv1": haloc.Tucker2(16, 16), "layer3.1.conv1": haloc.Dense()})
    haloc.save(tmp_path / "saved", haloc.apply_plan(haloc.narrowing.resized(model, speed.changes_of(narrowed)), plan))
    changes = speed.changes_of(tmp_path / "saved")
    assert changes == (*speed.changes_of(narrowed), ("layer3.0.conv1", haloc.Tucker2(16, 16)))

    def size(made) -> int:
        return haloc.inspect(made.network, image).params

    sizes = [size(each) for each in speed.between(model, changes, 5, image)]
    assert len(sizes) == 5
    assert size(speed.Made.of(model, changes, image)) < min(sizes)
    assert max(sizes) < haloc.inspect(model, image).params


def test_the_model_of_a_chip_needs_no_clock(script, narrowed, monkeypatch, tmp_path):
    speed, output = script("speed"), tmp_path / "speed.json"
    monkeypatch.setattr(haloc, "measure", lambda rows, target: real(rows, target, engine="bound"), raising=False)
    from haloc.cost.measure import measure as real

    how = ("--classes", 10, "--size", 32, "--output", output)
    for _ in range(2):  # rows of the same network are replaced
        started(speed, monkeypatch, "resnet20", narrowed, "--targets", "eyeriss", *how)
    (row,) = read_json(output)["rows"]
    assert row["latency_ms"]["plan"][0] < row["latency_ms"]["dense"][0]
    assert "measured_ms" not in row


def test_a_target_that_fails_is_said_and_the_others_go_on(script, narrowed, hurried, monkeypatch, tmp_path, capsys):
    speed, output = script("speed"), tmp_path / "speed.json"
    how = ("--classes", 10, "--size", 32, "--networks", 2, "--output", output)
    with pytest.raises(SystemExit) as stopped:
        started(speed, monkeypatch, "resnet20", narrowed, "--targets", "cpu:fp99:b1", "cpu:b1", *how)
    assert stopped.value.code == 1
    said = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert len(said) == 1
    assert said[0].startswith("cpu:fp99:b1 FAILED")
    assert [row["target"] for row in read_json(output)["rows"]] == ["cpu:b1"]


def test_rows_are_replaced_in_their_places(script, tmp_path):
    speed, path = script("speed"), tmp_path / "speed.json"
    rows = [{"network": "a", "plan": plan, "target": "cpu", "size": 224, "figure": 1} for plan in "xyz"]
    speed.keep(path, rows)
    speed.keep(path, [rows[1] | {"figure": 2}, rows[0] | {"size": 64}])
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
