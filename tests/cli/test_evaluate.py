from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from haloc.factor.between import fold_norms, insert_norms
from haloc.factor.surgery import apply_plan
from haloc.forms import Tucker2
from haloc.plan import Plan
from haloc.training.evaluate import evaluate as accuracy_of
from haloc.zoo import create, load_data

MODEL = """
from torch import nn
def make():
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3),
                         nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model for the digits, its weights, and a plan for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits_model.py").write_text(MODEL)
    space: dict = {}
    exec(MODEL, space)
    model: nn.Module = space["make"]()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    Plan({"3": Tucker2(6, 6)}).save(tmp_path / "plan.json")
    return tmp_path


def evaluate(haloc, *arguments):
    return haloc("evaluate", "digits_model:make", "--data", "digits", "--weights", "weights.safetensors", *arguments)


def test_a_table_for_people(haloc, folder):
    ran = evaluate(haloc)
    assert ran.code == 0
    assert "digits_model:make (dense) on digits, test" in ran.out
    assert "top-1" in ran.out
    assert "evaluating: 3" in ran.err


def test_json_for_machines_and_splits(haloc, folder):
    results = {split: json.loads(evaluate(haloc, "--split", split, "--json").out) for split in ("train", "val", "test")}
    assert sum(result["count"] for result in results.values()) == 1797
    assert all(0 <= result["top1"] <= result["top5"] <= 1 for result in results.values())
    assert json.loads(evaluate(haloc, "--limit", 50, "--json").out)["count"] == 50


def test_a_plan_makes_the_network_smaller(haloc, folder):
    ran = evaluate(haloc, "--plan", "plan.json", "--calibrate", 200, "--recalibrate", 300, "--json")
    result = json.loads(ran.out)
    assert result["params_dense"] - result["params"] == 16 * 16 * 9 - (16 * 6 + 6 * 6 * 9 + 6 * 16)
    assert "calibrating on training images: 200" in ran.err
    assert "factorising layers: 1" in ran.err
    assert "recalibrated 2 BatchNorms" in ran.err
    plain = json.loads(evaluate(haloc, "--plan", "plan.json", "--calibrate", 0, "--json").out)
    assert plain["loss"] != result["loss"]


def test_the_same_call_gives_the_same_figures(haloc, folder):
    runs = [json.loads(evaluate(haloc, "--plan", "plan.json", "--recalibrate", 300, "--json").out) for _ in range(2)]
    assert [run["loss"] for run in runs] == [runs[0]["loss"]] * 2


def save_factors(folder, plan: Plan, seed: int = 7) -> nn.Module:
    """Writes the weights of a factorised network that has seen more than its decomposition."""
    torch.manual_seed(seed)
    space: dict = {}
    exec(MODEL, space)
    small = apply_plan(space["make"](), plan)
    insert_norms(small, plan)
    small.train()(torch.rand(8, 1, 8, 8))
    fold_norms(small)
    save_file(small.state_dict(), folder / "factors.safetensors")
    return small


def test_weights_of_a_factorised_network(haloc, folder):
    small = save_factors(folder, Plan.load("plan.json"))
    ran = evaluate(haloc, "--plan", "plan.json", "--factors", "factors.safetensors", "--json")
    result = json.loads(ran.out)
    assert "calibrating" not in ran.err
    assert "factorising" not in ran.err
    assert (result["factors"], result["calibrated"]) == ("factors.safetensors", 0)
    assert result["params"] == sum(parameter.numel() for parameter in small.parameters())
    digits = load_data("digits")
    batches = digits.test.batches(250, normalisation=digits.normalisation)
    assert result["loss"] == pytest.approx(accuracy_of(small, batches).loss, rel=1e-5)
    decomposed = json.loads(evaluate(haloc, "--plan", "plan.json", "--json").out)
    assert decomposed["factors"] is None
    assert decomposed["loss"] != pytest.approx(result["loss"], rel=1e-4)


def test_factors_of_another_plan_or_without_one(refused, folder):
    save_factors(folder, Plan({"3": Tucker2(6, 5)}))
    base = ("evaluate", "digits_model:make", "--data", "digits", "--factors", "factors.safetensors")
    assert "'3.0.weight' has shape (5, 16, 1, 1), expected (6, 16, 1, 1)" in refused(
        *base, "--plan", "plan.json", code=1
    )
    assert "give that plan too, with --plan" in refused(*base, code=2)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--split", "tests"), 2, "Did you mean 'test'"),
        (("--data", "digit"), 2, "Did you mean 'digits'"),
        (("--data", "imagefolder"), 2, "root"),
        (("--data", "imagefolder", "--data-root", "nowhere"), 1, "nowhere"),
        (("--data", "cifar10", "--data-root", "nowhere"), 1, "nowhere"),
        (("--mean", "0.5"), 2, "--mean and --std belong together"),
        (("--mean", "0.5", "--std", "a"), 2, "--std takes numbers"),
        (("--mean", "0.5", "--std", "0"), 2, "std above 0"),
        (("--mean", "0.5,0.5", "--std", "1,1"), 2, "channel"),
        (("--device", "tpu9"), 2, "device 'tpu9' cannot be used here"),
        (("--plan", "none.json"), 1, "there is no file none.json"),
        (("--plan", "weights.safetensors"), 1, "weights.safetensors"),
        (("--plan", "plan.json", "--factors", "none.safetensors"), 1, "none.safetensors does not exist"),
        (("--plan", "plan.json", "--factors", "weights.safetensors"), 1, "names 4 missing (3.0.weight"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(refused, folder, arguments, code, text):
    base = ("evaluate", "digits_model:make", "--weights", "weights.safetensors")
    if "--data" not in arguments:
        base += ("--data", "digits")
    assert text in refused(*base, *arguments, code=code)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"3": Tucker2(17, 6)}, "at layer '3': tucker2 17/6 cannot be applied, rank_out 17 is outside 1..16"),
        ({"33": Tucker2(6, 6)}, "no layer '33'"),
        ({"1": Tucker2(6, 6)}, "it is a BatchNorm2d"),
    ],
)
def test_plans_that_do_not_fit(refused, folder, plan, text):
    Plan(plan).save("wrong.json")
    base = ("evaluate", "digits_model:make", "--weights", "weights.safetensors", "--data", "digits")
    assert text in refused(*base, "--plan", "wrong.json", code=1)


def test_weights_of_another_model(refused, folder):
    save_file(create("resnet20").state_dict(), "resnet20.safetensors")
    answer = refused("evaluate", "digits_model:make", "--weights", "resnet20.safetensors", "--data", "digits", code=1)
    assert "resnet20.safetensors" in answer
    state = create("resnet20").state_dict()
    save_file(state | {"conv1.weight": state["conv1.weight"][:1].clone()}, "short.safetensors")
    answer = refused("evaluate", "resnet20", "--weights", "short.safetensors", "--data", "digits", code=1)
    assert "'conv1.weight' has shape (1, 3, 3, 3), expected (16, 3, 3, 3)" in answer


def test_a_model_for_other_data(refused, folder):
    answer = refused("evaluate", "resnet20", "--data", "digits", "--mean", "0.5", "--std", "0.5", code=1)
    assert "does not run on the inputs given" in answer


def test_a_checkpoint_that_would_run_code_is_refused(refused, folder):
    torch.save({"model": nn.Linear(2, 2)}, "evil.pth")
    assert "evil.pth" in refused("evaluate", "resnet20", "--weights", "evil.pth", "--data", "digits", code=1)
