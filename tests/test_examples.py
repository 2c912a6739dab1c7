"""The examples, as small as they can be made."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from haloc.errors import DataError
from haloc.zoo import ImageSet, Splits, load_data

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in ("demo", "digits"):
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


def test_the_demo_on_stand_in_images(examples, monkeypatch, capsys):
    module = examples("demo")
    grey = load_data("digits").train
    images = grey.images[:400].repeat(1, 3, 4, 4)  # 32×32, three channels, ten classes
    stand_in = ImageSet(images, grey.labels[:400], grey.classes)
    monkeypatch.setattr(module, "load_data", lambda name: Splits(stand_in, stand_in, stand_in, stand_in))
    for name, value in {"IMAGES": 128, "TESTED": 20, "CALIBRATED": 20}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "SETTINGS", replace(module.SETTINGS, epochs=1))
    module.main()
    said = capsys.readouterr().out
    assert "… and fine-tuned" in said
    assert "50%" in said


def test_the_demo_takes_the_digits_where_cifar10_cannot_be_had(examples, monkeypatch, capsys):
    module = examples("demo")

    def refuse(name):
        raise DataError("no way to reach it")

    monkeypatch.setattr(module, "load_data", refuse)
    monkeypatch.setattr(module.digits, "main", lambda: sys.stdout.write("the digits ran"))
    module.main()
    said = capsys.readouterr().out
    assert "CIFAR-10 cannot be had here" in said
    assert "the digits ran" in said
