from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from haloc.artifact.store import load, read_card
from haloc.factor.surgery import apply_plan, plan_of
from haloc.forms import Tucker2
from haloc.plan import Plan
from tests.cli.conftest import TINY

PLAN = Plan({"3": Tucker2(4, 4)})


def make() -> nn.Module:
    space: dict = {}
    exec(TINY, space)
    return space["make"]()


@pytest.fixture
def folder(tiny):
    """The folder of the tiny models, with weights and a plan."""
    torch.manual_seed(3)
    save_file(make().state_dict(), "weights.safetensors")
    PLAN.save("plan.json")
    return tiny


def run(haloc, *arguments):
    base = ("apply", "tiny_models:make", "--weights", "weights.safetensors", "--plan", "plan.json")
    return haloc(*base, *arguments)


def test_a_network_is_factorised_and_saved(haloc, folder):
    ran = run(haloc, "--output", "out")
    assert ran.code == 0, ran
    assert "tiny_models:make by plan.json" in ran.out
    assert "factorising layers: 1" in ran.err
    model = make()
    model.load_state_dict(load_file("weights.safetensors"))
    small, wanted = load("out", make()), apply_plan(model, PLAN).eval()
    assert plan_of(small) == PLAN
    digits = torch.rand(2, 1, 8, 8)
    assert torch.equal(small(digits), wanted(digits))


def test_data_make_it_better(haloc, folder):
    ran = run(haloc, "--output", "out", "--data", "digits", "--calibrate", 200, "--recalibrate", 300, "--json")
    result = json.loads(ran.out)
    assert (result["calibrated"], result["recalibrated"], result["classes"]) == (200, 300, 10)
    assert result["params_dense"] - result["params"] == 8 * 8 * 9 - (8 * 4 + 4 * 4 * 9 + 4 * 8)
    assert "calibrating on training images: 200" in ran.err
    assert "recalibrating BatchNorm on training images: 300" in ran.err
    card = read_card("out")
    assert card["provenance"]["command"] == "apply"
    assert card["provenance"]["data"] == "digits"
    plain = json.loads(run(haloc, "--output", "plain", "--json").out)
    assert (plain["calibrated"], plain["recalibrated"], plain["data"]) == (0, 0, None)
    state, other = load_file("out/weights.safetensors"), load_file("plain/weights.safetensors")
    assert not torch.allclose(state["3.0.weight"], other["3.0.weight"])
    assert not torch.allclose(state["4.running_var"], other["4.running_var"])


def test_a_saved_network_is_replaced_but_nothing_else(haloc, refused, folder):
    assert run(haloc, "--output", "out").code == 0
    assert run(haloc, "--output", "out").code == 0
    Path("run").mkdir()
    Path("run/weights.safetensors").write_text("of a run")
    base = ("apply", "tiny_models:make", "--plan", "plan.json")
    assert "run has the weights.safetensors of something else" in refused(*base, "--output", "run", code=1)
    assert Path("run/weights.safetensors").read_text() == "of a run"
    assert "plan.json is a file, expected a folder" in refused(*base, "--output", "plan.json", code=1)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--plan", "none.json"), 1, "there is no file none.json"),
        (("--plan", "plan.json", "--calibrate", 100), 2, "--calibrate looks at training images; say which"),
        (("--plan", "plan.json", "--recalibrate", 100), 2, "--recalibrate looks at training images"),
        (("--plan", "plan.json", "--data", "digit"), 2, "Did you mean 'digits'"),
        (("--plan", "plan.json", "--weights", "none.safetensors"), 1, "none.safetensors does not exist"),
        (("--plan", "plan.json", "--device", "tpu"), 2, "device 'tpu' cannot be used here"),
        (("--plan", "wrong.json"), 1, "no layer '33'"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(refused, folder, arguments, code, text):
    Plan({"33": Tucker2(4, 4)}).save("wrong.json")
    assert text in refused("apply", "tiny_models:make", "--output", "out", *arguments, code=code)
    assert not Path("out").exists()


def test_random_weights_are_told(haloc, folder):
    Plan({"linear": Tucker2(4, 4)}).save("plan.json")
    assert (
        "warning: resnet20 without --weights has random ones"
        in haloc("apply", "resnet20", "--plan", "plan.json", "--output", "out").err
    )
