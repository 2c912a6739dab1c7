"""The recipes for ImageNet, on a folder of the same form with two classes and a handful of pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from haloc.files import read_json
from haloc.plan import Plan
from haloc.zoo import create
from tests.cli.conftest import haloc

__all__ = ["haloc"]

RECIPES = Path(__file__).parents[1] / "recipes"
MODELS = {"resnet18": "resnet18", "mobilenetv2": "mobilenet_v2"}
#: Two layers are enough to see that everything is done, and large ones take long to be fitted.
LAYERS = {
    "resnet18": ["layer1.0.conv1", "layer2.0.downsample.0"],
    "mobilenetv2": ["features.3.conv.0.0", "classifier.1"],
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder as the recipes expect it, with two classes."""
    draw = np.random.RandomState(0)
    for part, count in (("train", 6), ("val", 2)):
        for name in ("n01440764", "n01443537"):
            place = tmp_path / "data" / "imagenet" / part / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = draw.randint(0, 256, (72, 90, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{name}_{number}.JPEG")
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def weights(name: str) -> str:
    torch.manual_seed(0)
    path = f"weights/{name}.safetensors"
    save_file(create(MODELS[name], num_classes=2).state_dict(), path)
    return path


def changed(name: str) -> list[str]:
    """What makes a run of two steps of it: fewer pictures and epochs, a CPU."""
    brief = {
        "model.weights": weights(name), "run.device": "cpu", "data.batch_size": 4, "data.images": 8, "data.workers": 0,
        "data.test_images": 4, "budget.macs": "99%", "budget.params": "99.9%", "space.layers": json.dumps(LAYERS[name]),
        "search.activations": 4, "search.settings.warmup_epochs": 0, "search.settings.images": 4,
        "search.training.epochs": 1, "search.training.precision": "fp32", "search.training.channels_last": "false",
        "recalibrate.images": 4, "finetune.epochs": 1, "finetune.warmup_epochs": 0, "finetune.precision": "fp32",
        "finetune.channels_last": "false", "export.formats": "[]",
    }  # fmt: skip
    return [part for key, value in brief.items() for part in ("--set", f"{key}={value}")]


@pytest.mark.parametrize("name", MODELS)
def test_a_dry_run_says_how_long_it_takes(name, folder, haloc):
    given = ("--set", "run.device=cpu", "--set", f"model.weights={weights(name)}", "--set", "data.batch_size=2",
             "--set", "data.workers=0")  # fmt: skip
    ran = haloc("compress", RECIPES / f"imagenet-{name}.toml", *given, "--dry-run", "--json")
    assert ran.code == 0, ran.err
    stages = {stage["name"]: stage for stage in json.loads(ran.out)["stages"]}
    assert stages["search"]["state"] == stages["finetune"]["state"] == "to do"
    assert stages["finetune"]["seconds"] > 0
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", MODELS)
def test_two_steps_of_it_end_in_a_network(name, folder, haloc):
    ran = haloc("compress", RECIPES / f"imagenet-{name}.toml", *changed(name), "--output", "run")
    assert ran.code == 0, ran.err
    facts = read_json("run/report.json")
    assert facts["verdict"]["met"]
    assert len((Path("run") / "finetune" / "log.jsonl").read_text().splitlines()) == 1
    assert set(Plan.load("run/plan.json").changes()) <= set(LAYERS[name])


def test_mobilenetv2_is_narrowed_as_its_recipe_says(folder, haloc):
    text = (RECIPES / "imagenet-mobilenetv2.toml").read_text(encoding="utf-8")
    start = text.index("# [narrow]")
    end = text.index("\n\n", start)
    Path("narrow.toml").write_text(text[:start] + text[start:end].replace("# ", "") + text[end:], encoding="utf-8")
    few = ("--set", "narrow.images=4", "--set", "narrow.tried=2")
    ran = haloc("compress", "narrow.toml", *changed("mobilenetv2"), *few, "--output", "run")
    assert ran.code == 0, ran.err
    facts = read_json("run/report.json")
    assert facts["verdict"]["met"]
    assert facts["search"]["method"] == "none"
    assert any(row["form"] == "narrowed" for row in facts["layers"])
