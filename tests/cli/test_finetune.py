from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from haloc.forms import Tucker2
from haloc.plan import Plan
from haloc.training.baseline import WEIGHTS, train
from haloc.training.settings import TrainSettings
from haloc.zoo import load_data
from tests.cli.conftest import weights
from tests.training.tiny import same

BASE = ("finetune", "tiny_models:make", "--data", "digits", "--batch-size", 128, "--plan", "plan.json")
BASE += ("--weights", "dense.safetensors")


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> bytes:
    """The weights of a tiny model that knows its digits."""
    from tests.cli.conftest import TINY

    space: dict = {}
    exec(TINY, space)
    digits, folder = load_data("digits"), tmp_path_factory.mktemp("dense")
    batches = digits.train.batches(128, normalisation=digits.normalisation, augment=True, shuffle=True)
    torch.manual_seed(0)
    train(space["make"](), batches, settings=TrainSettings(epochs=12, warmup_epochs=1), folder=folder)
    return (folder / WEIGHTS).read_bytes()


@pytest.fixture
def folder(tiny, dense):
    (tiny / "dense.safetensors").write_bytes(dense)
    Plan({"3": Tucker2(4, 4)}).save(tiny / "plan.json")
    return tiny


@pytest.fixture
def finetune(haloc, folder):
    def run(*arguments, output="run", epochs=2):
        return haloc(*BASE, "--epochs", epochs, "--output", output, *arguments)

    return run


@pytest.mark.parametrize("more", [(), ("--no-norm-between",)])
def test_from_a_plan_to_weights_that_evaluate_reads(haloc, finetune, folder, more):
    ran = finetune("--json", *more, epochs=6)
    assert ran.code == 0, ran.err
    assert "calibrating on training images: 1,000" in ran.err
    assert "fine-tuning tiny_models:make on 1,295 images of digits" in ran.err
    found = json.loads(ran.out)
    assert found == json.loads(Path("run/result.json").read_text())
    assert found["params_dense"] - found["params"] > 250
    assert found["test"]["top1"] > 0.8
    evaluate = ("evaluate", "tiny_models:make", "--data", "digits", "--plan", "run/plan.json", "--json")
    again = json.loads(haloc(*evaluate, "--factors", "run/weights.safetensors").out)
    assert found["test"]["loss"] == pytest.approx(again["loss"], rel=1e-5)
    config = json.loads(Path("run/config.json").read_text())
    assert (config["command"], config["plan"]["3"]["rank_out"], config["settings"]["lr"]) == ("finetune", 4, 0.05)
    assert str(folder) not in Path("run/config.json").read_text() + Path("run/result.json").read_text()


def test_a_table_for_people(finetune):
    ran = finetune(epochs=1)
    assert "tiny_models:make by plan.json, trained on digits" in ran.out


def test_going_on_is_the_run_in_one_go_and_calibrates_nothing(finetune):
    finetune("--norm-between", output="whole", epochs=3)
    finetune("--norm-between", "--minutes", 1e-6, epochs=3)
    on = finetune("--norm-between", epochs=3)
    assert "going on from epoch 1 of 3 in run" in on.err
    assert "calibrating" not in on.err
    assert "factorising" not in on.err
    assert same(weights("whole"), weights("run"))


def test_every_teacher_teaches_something_else(finetune):
    runs = {
        "own": (),
        "none": ("--no-distillation",),
        "unheard": ("--distillation", 0, "--cross-entropy", 1),
        "weak": ("--teacher", "tiny_models:other"),
        "maps": ("--features", 1),
        "random": ("--teacher", "tiny_models:make"),
    }
    for name, arguments in runs.items():
        ran = finetune(*arguments, "--calibrate", 0, output=name, epochs=1)
        assert ran.code == 0, ran.err
    kept = {name: weights(name)["3.0.weight"] for name in runs}
    assert torch.equal(kept["none"], kept["unheard"])
    assert len({tuple(value.flatten().tolist()) for value in kept.values()}) == len(runs) - 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("--temperature", 2), "recovery.temperature = 4.0, and now it is 2.0"),
        (("--calibrate", 0), "calibrate = 1000, and now it is 0"),
        (("--no-distillation",), "recovery.cross_entropy = 0.1, and now it is 1.0"),
        (("--teacher", "tiny_models:other"), "teacher = None, and now it is tiny_models:other"),
        (("--plan", "other.json"), "plan.3.rank_in = 4, and now it is 3"),
    ],
)
def test_other_settings_are_not_gone_on_with(finetune, refused, change, text):
    finetune("--minutes", 1e-6)
    Plan({"3": Tucker2(4, 3)}).save("other.json")
    assert text in refused(*BASE, "--epochs", 2, "--output", "run", *change, code=2)
    assert Plan.load("run/plan.json") == Plan.load("plan.json")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--no-distillation", "--features", 1), 2, "--features needs a teacher"),
        (("--no-distillation", "--teacher", "tiny_models:other"), 2, "--no-distillation does without a teacher"),
        (("--distillation", 0, "--cross-entropy", 0), 2, "not all 0"),
        (("--distillation", 0, "--teacher", "tiny_models:other"), 2, "a teacher that weighs nothing teaches nothing"),
        (("--teacher", "tiny_models:other", "--features", 1), 1, "layers have the names of the factorised ones"),
        (("--teacher", "tiny_models:many"), 1, "the teacher tells 12 classes apart and the model 10"),
        (("--teacher", "resnet20"), 2, "'resnet20' alone has random weights; say where its trained ones are"),
        (("--temperature", 0), 2, "temperature must be above 0"),
        (("--schedule", "step"), 2, "Did you mean 'steps'"),
        (("--plan", "none.json"), 1, "there is no file none.json"),
        (("--plan", "wrong.json"), 1, "no layer '33'"),
        (("--weights", "none.safetensors"), 1, "none.safetensors does not exist"),
        (("--teacher-weights", "plan.json"), 1, "plan.json is no readable PyTorch file"),
    ],
)
def test_mistakes_leave_no_folder_behind(refused, folder, arguments, code, text):
    Plan({"33": Tucker2(4, 4)}).save("wrong.json")
    assert text in refused(*BASE, "--output", "run", *arguments, code=code)
    assert not Path("run").exists()


def test_a_model_of_the_zoo_needs_its_weights(refused, folder):
    answer = refused("finetune", "resnet20", "--plan", "plan.json", "--output", "run", code=2)
    assert "say where its trained ones are, with --weights" in answer


def test_the_run_of_another_verb_is_left_alone(haloc, refused, folder):
    haloc("train", "tiny_models:make", "--data", "digits", "--epochs", 1, "--output", "run")
    assert "holds a run of `haloc train`" in refused(*BASE, "--no-resume", "--output", "run", code=2)


def test_two_processes_do_what_one_does_and_one_of_them_speaks(finetune, folder):
    assert finetune(output="one").code == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    ran = subprocess.run(
        [*launcher, "-m", "haloc", *map(str, BASE), "--epochs", "2", "--output", "two", "--json"],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["test"]["count"] == 359
    assert ran.stderr.count("epoch 2/2") == 1
    assert ran.stderr.count("calibrating on training images") == 1
    assert "arning" not in ran.stderr
    one, two = weights("one"), weights("two")
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-4, rtol=1e-4)
    assert len(Path("two/log.jsonl").read_text().splitlines()) == 2
    assert len(list(Path("two").glob("events.out.*"))) == 1
    assert sorted(path.name for path in Path("two/checkpoints").iterdir()) == ["step-0000000020"]


def test_a_model_from_elsewhere_may_bring_its_own_weights(haloc, folder):
    base = ("finetune", "tiny_models:make", "--data", "digits", "--plan", "plan.json", "--epochs", 1)
    assert haloc(*base, "--output", "run").code == 0
