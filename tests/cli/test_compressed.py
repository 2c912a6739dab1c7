"""What the verbs make of a network of the zoo that is compressed already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from haloc.cost import sampling
from haloc.files import read_json
from haloc.forms import Svd, Tucker2
from haloc.plan import Plan
from tests.cli.test_compress import RECIPE
from tests.zoo.compressed import digits_net, register

NAME = "digits_net-haloc"
DATA = ("--data", "digits")


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """A compressed network in the zoo; measuring need not take as long as it should."""
    monkeypatch.chdir(tmp_path)
    brief = sampling.Schedule(2, 2, 0.0, 0.0005, 2)
    monkeypatch.setattr(sampling, "SCHEDULES", dict.fromkeys(sampling.SCHEDULES, brief))
    return register(monkeypatch, tmp_path / "packaged")


def params(network) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.fixture
def run(haloc):
    """Runs a verb that must succeed and returns what it printed as JSON."""

    def go(verb, *arguments):
        ran = haloc(verb, *arguments, "--json")
        assert ran.code == 0, ran.err
        return json.loads(ran.out)

    return go


def test_inspect_shows_its_factors(run):
    layers = run("inspect", NAME)
    assert {"3.0", "3.1", "3.2", "6.0", "6.1"} <= {row["name"] for row in layers["layers"]}


def test_evaluate_compares_with_the_dense_network(haloc, run, small):
    found = run("evaluate", NAME, "--weights", "pretrained", *DATA)
    assert (found["params"], found["params_dense"]) == (params(small), params(digits_net()))
    ran = haloc("evaluate", NAME, "--weights", "pretrained", *DATA)
    assert f"{NAME} (compressed digits_net) on digits, test" in ran.out


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_export(run, suffix):
    found = run("export", NAME, "--weights", "pretrained", *DATA, "--output", f"small.{suffix}")
    evaluated = run("evaluate", NAME, *DATA, "--from", f"small.{suffix}", *(("--trust",) if suffix == "pt2" else ()))
    assert found["top1"]["fp32"] == evaluated["top1"]
    assert found["parity"]["real"]["same_answer"] == 1


def test_factorised_once_more_and_read_by_its_own_name(run):
    Plan({"3.1": Tucker2(4, 4), "11.0": Svd(2)}).save("plan.json")
    made = run("apply", NAME, "--weights", "pretrained", *DATA, "--plan", "plan.json", "--output", "smaller")
    found = run("evaluate", NAME, "--from", "smaller", *DATA)
    assert found["params"] == made["params"] < made["params_dense"]


def test_train_and_finetune(run):
    brief = ("--epochs", 1, "--warmup-epochs", 0, "--batch-size", 128, *DATA)
    run("train", NAME, *brief, "--output", "trained")
    found = run("evaluate", NAME, "--weights", "trained/weights.safetensors", *DATA)
    assert found["top1"] == read_json("trained/result.json")["test"]["top1"]
    Plan({"3.1": Tucker2(4, 4)}).save("plan.json")
    tuned = run("finetune", NAME, "--weights", "pretrained", "--plan", "plan.json", *brief, "--output", "tuned")
    found = run("evaluate", NAME, "--plan", "plan.json", "--factors", "tuned/weights.safetensors", *DATA)
    assert found["top1"] == tuned["test"]["top1"]


def test_a_compressed_network_without_weights_is_not_searched(refused):
    message = refused("search", NAME, "--method", "energy", "--budget", "80%", "--output", "found", code=2)
    assert message.endswith("say where its trained ones are, with --weights pretrained")


def test_measure_predict_and_search(run):
    run("measure", NAME, "--target", "cpu:eager:b1", "--output", "table.json")
    space = ("--weights", "pretrained", "--method", "energy", "--round-to", 1)
    run("search", NAME, *space, "--budget", "macs=90%", "--output", "found")
    plan = Plan.load("found/plan.json")
    assert plan.changes()
    assert {name.count(".") for name in plan} <= {0, 1}
    found = run("predict", NAME, "--plan", "found/plan.json", "--table", "table.json")
    assert found["macs"]["plan"] <= 0.9 * found["macs"]["dense"]


def test_compress_makes_it_smaller_still(run):
    text = RECIPE.replace("tiny_models:make", NAME).replace("dense.safetensors", "pretrained").replace("60%", "90%")
    Path("small.toml").write_text(text)
    facts = run("compress", "small.toml")
    assert facts["verdict"]["met"]
    found = run("evaluate", NAME, "--from", "runs/small/model", *DATA, "--limit", 200)
    assert found["count"] == 200
