from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from PIL import Image

from haloc.cli.options import make_model
from haloc.training import baseline
from tests.cli.conftest import weights
from tests.training.tiny import same

BASE = ("train", "tiny_models:make", "--data", "digits", "--batch-size", 128, "--warmup-epochs", 1)


@pytest.fixture
def train(haloc, tiny):
    """Trains a tiny model in a folder of its own, three epochs unless told otherwise."""

    def run(*arguments, output="run", epochs=3):
        return haloc(*BASE, "--epochs", epochs, "--output", output, *arguments)

    return run


def test_from_scratch_to_a_table(train, tiny):
    ran = train(epochs=6)
    assert ran.code == 0, ran.err
    assert "tiny_models:make, trained on digits" in ran.out
    assert "run/weights.safetensors" in ran.out
    first, *middle, last = [line for line in ran.err.splitlines() if line.startswith("epoch ")]
    assert first.startswith("epoch 1/6  loss ")
    assert middle == []
    assert last.startswith("epoch 6/6  loss ")
    assert [part.split()[0] for part in last.split("  ")[1:4]] == ["loss", "accuracy", "val"]
    assert last.endswith(" images/s  0 s left")
    names = {path.name.split(".tfevents")[0] for path in (tiny / "run").iterdir()}
    assert names == {"checkpoints", "log.jsonl", "events.out", "weights.safetensors", "config.json", "result.json"}
    config = json.loads(Path("run/config.json").read_text())
    assert (config["kind"], config["format"], config["command"]) == ("haloc-run", 1, "train")
    assert (config["model"], config["settings"]["epochs"]) == ("tiny_models:make", 6)
    assert config["versions"]["torch"] == torch.__version__
    assert str(tiny) not in Path("run/config.json").read_text() + Path("run/result.json").read_text()


def test_json_for_machines(haloc, train, tiny):
    found = json.loads(train("--json", epochs=6).out)
    assert found == json.loads(Path("run/result.json").read_text())
    assert found["test"]["count"] == 359
    assert found["test"]["top1"] > 0.6
    assert (found["epochs_done"], found["finished"], found["weights"]) == (6, True, "run/weights.safetensors")
    evaluate = ("evaluate", "tiny_models:make", "--data", "digits", "--weights", "run/weights.safetensors", "--json")
    again = json.loads(haloc(*evaluate).out)
    assert found["test"]["loss"] == pytest.approx(again["loss"], rel=1e-5)
    held = json.loads(haloc(*evaluate, "--split", "val").out)
    assert found["val"] == pytest.approx({name: held[name] for name in ("top1", "top5", "loss")}, rel=1e-5)


def test_the_seed_decides_and_nothing_else(train):
    train(output="one", epochs=1)
    torch.manual_seed(5)
    train(output="again", epochs=1)
    train("--seed", 1, output="other", epochs=1)
    assert same(weights("one"), weights("again"))
    assert not same(weights("one"), weights("other"))
    before = torch.get_rng_state()
    train(output="third", epochs=1)
    assert torch.equal(before, torch.get_rng_state())


def test_a_last_run_without_validation_or_test(train):
    ran = train("--whole", "--no-test", "--cutout", 3, "--label-smoothing", 0.1, "--ema", 0.9, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert (found["val"], found["test"]) == (None, None)
    assert "on 1,438 images of digits" in ran.err
    assert " val " not in ran.err
    config = json.loads(Path("run/config.json").read_text())
    assert (config["data"]["whole"], config["data"]["cutout"], config["label_smoothing"]) == (True, 3, 0.1)
    train("--whole", "--no-test", output="plain")
    assert not same(weights("run"), weights("plain"))


def test_from_weights(train):
    train(output="first")
    train("--weights", "first/weights.safetensors", "--lr", 1e-9, output="second", epochs=1)
    parameters = [name for name in weights("first") if name.endswith(("weight", "bias"))]
    assert all(torch.allclose(weights("first")[name], weights("second")[name], atol=1e-6) for name in parameters)


def test_a_run_that_is_gone_on_with_is_the_run_in_one_go(train):
    train(output="whole")
    stopped = train("--minutes", 1e-6)
    assert stopped.code == 0
    assert "1 of 3" in stopped.out
    assert "the same command with more --minutes" in stopped.err
    first = json.loads(Path("run/result.json").read_text())
    assert (first["finished"], first["epochs_done"], first["test"]) == (False, 1, None)
    on = train("--json")
    assert "going on from epoch 1 of 3 in run" in on.err
    found = json.loads(on.out)
    assert found["test"] == json.loads(Path("whole/result.json").read_text())["test"]
    assert same(weights("whole"), weights("run"))
    rows = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert all(one["seconds"] < other["seconds"] for one, other in pairwise(rows))
    again = train("--json")
    assert "going on from epoch 3 of 3 in run" in again.err
    assert json.loads(again.out)["test"] == found["test"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("--lr", 0.2), "settings.lr = 0.1, and now it is 0.2"),
        (("--seed", 1), "seed = 0, and now it is 1"),
        (("--cutout", 2), "cutout=0), and now it is CropFlip(padding=1, flip=False, cutout=2)"),
        (("--label-smoothing", 0.1), "label_smoothing = 0.0, and now it is 0.1"),
        (("--mean", "0.5", "--std", "0.5"), "data.weights.scale = Normalisation(mean=(0.3053,)"),
    ],
)
def test_other_settings_are_not_gone_on_with(train, refused, change, text):
    train("--minutes", 1e-6)
    before = {
        path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file() and "tfevents" not in path.name
    }
    answer = refused(*BASE, "--epochs", 3, "--output", "run", *change, code=2)
    assert text in answer
    assert {path: path.read_bytes() for path in before} == before


def test_without_resuming_all_begins_anew(train):
    train("--minutes", 1e-6)
    ran = train("--no-resume", "--lr", 0.2, "--minutes", 1e-6)
    assert "going on" not in ran.err
    config = json.loads(Path("run/config.json").read_text())
    assert config["settings"]["lr"] == 0.2
    assert len(Path("run/log.jsonl").read_text().splitlines()) == 1
    assert len(list(Path("run/checkpoints").iterdir())) == 1


def test_a_damaged_checkpoint_is_a_line_of_warning(train):
    train("--save-every-s", 0)
    *_, newest = sorted(Path("run/checkpoints").glob("step-*/state.safetensors"))
    newest.write_bytes(newest.read_bytes()[:100])
    ran = train("--save-every-s", 0)
    assert ran.code == 0, ran.err
    (line,) = [line for line in ran.err.splitlines() if line.startswith("warning: ")]
    assert "a checkpoint is not used: run/checkpoints/step-" in line


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--schedule", "cosin"), 2, "Did you mean 'cosine'"),
        (("--precision", "fp8"), 2, "there is no precision 'fp8', expected one of fp32, tf32, bf16, fp16"),
        (("--speed", "fast"), 2, "there is no speed 'fast'"),
        (("--lr", "-1"), 2, "lr must be above 0"),
        (("--epochs", "0"), 2, "epochs must be at least 1"),
        (("--label-smoothing", "1"), 2, "label_smoothing must be"),
        (("--accumulate", "3"), 2, "a batch of 128 cannot be shared equally"),
        (("--batch-size", "2000"), 1, "do not fill one batch of 2000"),
        (("--data", "digit"), 2, "Did you mean 'digits'"),
        (("--device", "tpu9"), 2, "device 'tpu9' cannot be used here"),
        (("--mean", "0.5"), 2, "--mean and --std belong together"),
        (("--mean", "0,0,0", "--std", "1,1,1"), 2, "for images of 3 channels"),
        (("--weights", "none.safetensors"), 1, "none.safetensors does not exist"),
        (("--data", "imagefolder", "--data-root", "nowhere"), 1, "nowhere"),
    ],
)
def test_mistakes_leave_no_folder_behind(refused, tiny, arguments, code, text):
    assert text in refused(*BASE, "--output", "run", *arguments, code=code)
    assert not Path("run").exists()


def test_models_that_do_not_answer(refused, tiny):
    rest = ("--data", "digits", "--output", "run")
    assert "only 5 classes apart" in refused("train", "tiny_models:few", *rest, code=1)
    scale = ("--mean", "0.5", "--std", "0.5")
    assert "does not run on the inputs" in refused("train", "resnet20", *rest, *scale, code=1)
    assert "no 'made'" in refused("train", "tiny_models:made", *rest, code=2)
    assert not Path("run").exists()


def test_a_model_of_the_zoo_has_as_many_classes_as_the_data():
    assert [make_model("resnet20", None, classes)(torch.zeros(1, 3, 32, 32)).shape[1] for classes in (7, None)] == [
        7,
        10,
    ]


def test_folders_that_are_not_ours(train, refused, tiny):
    def answer(code):
        return refused(*BASE, "--output", "run", code=code)

    Path("run").write_text("mine")
    assert "run is a file" in answer(1)
    Path("run").unlink()
    Path("run").mkdir()
    (tiny / "run" / "thesis.tex").write_text("mine")
    assert "run has something else in it than a run of haloc" in answer(1)
    (tiny / "run" / "config.json").write_text('{"kind": "other"}')
    assert "run has something else in it than a run of haloc" in answer(1)
    (tiny / "run" / "config.json").write_text("{")
    assert "config.json is not JSON" in answer(1)
    (tiny / "run" / "config.json").write_text('{"kind": "haloc-run", "command": "finetune"}')
    assert "holds a run of `haloc finetune`" in answer(2)
    assert {path.name for path in Path("run").iterdir()} == {"thesis.tex", "config.json"}


def test_pictures_in_folders(haloc, refused, tiny):
    (tiny / "coloured.py").write_text(
        "from torch import nn\n"
        "def make():\n    return nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(3 * 7 * 7, 2))\n"
    )
    for part, kind, number in product(("train", "val"), ("cat", "dog"), range(4)):
        path = tiny / "pictures" / part / kind / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (200, 10, 10) if kind == "cat" else (10, 10, 200)).save(path)
    base = ("train", "coloured:make", "--data", "imagefolder", "--data-root", "pictures", "--output", "run")
    base += ("--batch-size", 2, "--epochs", 1)
    assert "cutout is for images held in memory" in refused(*base, "--cutout", 8, code=2)
    ran = haloc(*base, "--workers", 1, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["finished"]


@pytest.mark.parametrize(("arguments", "how"), [((), "again"), (("--no-resume",), "without --no-resume")])
def test_how_to_go_on_after_an_interrupt(train, monkeypatch, arguments, how):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(baseline, "train", interrupted)
    ran = train(*arguments)
    assert ran.code == 130
    assert ran.err.splitlines()[-1] == f"haloc: interrupted; run the same command {how} to go on"


def test_a_run_that_is_interrupted_can_be_gone_on_with(train, tiny):
    arguments = [*map(str, BASE), "--epochs", "5000", "--save-every-s", "0", "--output", "run"]
    # A shell may have told us to ignore the signal, and children inherit that.
    running = subprocess.Popen(
        [sys.executable, "-m", "haloc", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        deadline = time.monotonic() + 60
        while not list(Path("run/checkpoints").glob("step-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == "haloc: interrupted; run the same command again to go on"
    assert "Traceback" not in err
    ran = train("--minutes", 1e-6, "--json", epochs=5000)
    assert ran.code == 0, ran.err
    assert "going on from epoch " in ran.err
    assert json.loads(ran.out)["epochs_done"] > 1
