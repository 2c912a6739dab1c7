"""The examples, as small as they can be made."""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from haloc.cost import sampling
from haloc.errors import DataError
from haloc.factor.forward import evaluating
from haloc.zoo import ImageSet, Splits, data, load_data

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in ("demo", "digits", "segmentation", "detector"):
        sys.modules.pop(name, None)


def small_digits(monkeypatch, module) -> None:
    for name in ("TRAINING", "RECOVERING"):
        monkeypatch.setattr(module, name, replace(getattr(module, name), epochs=3))


def test_the_digits_are_trained_factorised_and_recovered(examples, monkeypatch, capsys):
    module = examples("digits")
    small_digits(monkeypatch, module)
    module.main()
    said = capsys.readouterr().out
    assert "epoch 3 of 3" in said
    assert [name for name in ("dense", "factorised", "fine-tuned") if name in said] == [
        "dense",
        "factorised",
        "fine-tuned",
    ]


def test_the_demo_on_stand_in_images(examples, monkeypatch, capsys, tmp_path):
    module = examples("demo")
    grey = load_data("digits").train
    images = grey.images[:400].repeat(1, 3, 4, 4)  # 32×32, three channels, ten classes
    stand_in = ImageSet(images, grey.labels[:400], grey.classes)
    splits = Splits(stand_in, stand_in, stand_in, stand_in)
    for home in (module, data):
        monkeypatch.setattr(home, "load_data", lambda name, **_: splits)
    brief = sampling.Schedule(2, 2, 0.0, 0.0005, 2)
    monkeypatch.setattr(sampling, "SCHEDULES", dict.fromkeys(sampling.SCHEDULES, brief))
    monkeypatch.chdir(tmp_path)
    # One layer and one form, so that little is measured; the clocks of this test are nothing to hold a budget against.
    changes = ["target.networks=0", "target.attempts=1", "budget.latency=1.0", "space.layers=['layer3.2.conv2']"]
    changes += ["space.forms=['spatial']", "space.round_to=32", "search.activations=16", "search.settings.images=16"]
    changes += ["data.images=128", "data.test_images=32", "finetune.epochs=1", "recalibrate.images=32"]
    changes += ["export.formats=['onnx']", "export.int8=false"]
    monkeypatch.setattr(sys, "argv", ["demo", *(word for change in changes for word in ("--set", change))])
    with suppress(SystemExit):
        module.main()
    ran = capsys.readouterr()
    assert "latency, measured" in ran.out
    assert "… and fine-tuned" in ran.out
    assert "the report is runs/demo/report.html" in ran.err
    assert (tmp_path / "runs/demo/report.html").exists()


def test_the_demo_takes_the_digits_where_cifar10_cannot_be_had(examples, monkeypatch, capsys):
    module = examples("demo")

    def refuse(name):
        raise DataError("no way to reach it")

    monkeypatch.setattr(module, "load_data", refuse)
    monkeypatch.setattr(module.digits, "main", lambda: sys.stdout.write("the digits ran"))
    module.main()
    ran = capsys.readouterr()
    assert "CIFAR-10 cannot be had here" in ran.err
    assert "the digits ran" in ran.out


#: As little as it takes to be clearly better than nothing: how many pictures and epochs, the least score; and exports.
SMALL: dict[str, tuple[int, int, float, list[str]]] = {
    "segmentation": (192, 7, 0.35, []),  # a network that sees background alone has 0.22
    "detector": (256, 9, 0.3, ["onnx"]),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_task_of_ones_own_is_trained_and_compressed(examples, monkeypatch, capsys, tmp_path, name):
    module, (images, epochs, least, formats) = examples(name), SMALL[name]
    brief = sampling.Schedule(3, 3, 0.0, 0.001, 2)
    monkeypatch.setattr(sampling, "SCHEDULES", dict.fromkeys(sampling.SCHEDULES, brief))
    monkeypatch.setattr(module, "IMAGES", {"train": images, "val": 32, "test": 64})
    monkeypatch.setattr(module, "TRAINING", replace(module.TRAINING, epochs=epochs))
    monkeypatch.setattr(module, "SPACE", {"round_to": 16, "forms": ["tucker2"]})
    monkeypatch.setattr(module, "SEARCH", {"method": "sensitivity", "activations": 0, "settings": {"images": 16}})
    monkeypatch.setattr(module, "BATCH", 16)
    monkeypatch.setattr(module, "EXPORT", {"formats": formats})
    monkeypatch.setattr(module, "BUDGET", {"macs": "60%"})
    monkeypatch.setattr(module, "RECOVERING", {**module.RECOVERING, "epochs": 2})
    module.main(str(tmp_path / "run"))
    said = capsys.readouterr().out
    ((before, after),) = re.findall(r"^(?:mean IoU|F1) +([\d.]+) → ([\d.]+)$", said, re.MULTILINE)
    assert float(before) > least
    assert float(after) > float(before) - 0.08
    (share,) = re.findall(r"\((\d+)%\)", said)
    assert int(share) <= 60
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize("name", SMALL)
def test_a_task_of_ones_own_has_what_a_recipe_names(examples, monkeypatch, name):
    module = examples(name)
    monkeypatch.setattr(module, "IMAGES", {"train": 64, "val": 32, "test": 32})
    model, loaders = module.make_model(), module.make_loaders()
    assert set(loaders) == {"train", "val", "test"}
    terms = module.loss(model, next(iter(loaders["train"])))
    assert all(term.requires_grad and term.dim() == 0 for term in terms.values())
    with evaluating(model):
        assert 0 <= module.score(model) <= 0.3  # it has learnt nothing yet
