"""The flow without labels: pictures, blocks that are reconstructed, nothing that is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from haloc.errors import SpecError
from haloc.files import read_json
from haloc.pipeline.flow import compress_recipe
from haloc.pipeline.job import job_from
from haloc.pipeline.recipe import Recipe
from haloc.pipeline.recipe_file import read_recipe
from tests.pipeline.small import OPTIONS, Told, compress


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 3),
    ).eval()  # fmt: skip


@pytest.fixture
def pictures(tmp_path):
    random = np.random.RandomState(0)
    for folder in ("some", "val/0", "val/1", "val/2"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(12 if folder == "some" else 2):
            pixels = random.randint(256, size=(24, 20, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / folder / f"{number}.png")
    return tmp_path


def recipe(pictures, **changes):
    told = {
        "model": {"name": "tests.pipeline.test_untrained:make", "inputs": ["1x3x16x16"]},
        "data": {"name": "pictures", "root": str(pictures / "some"), "batch_size": 4},
        **{name: OPTIONS[name] for name in ("budget", "space", "export")},
        "search": {"method": "sensitivity", "activations": 8, "settings": {"images": 8}},
        "recalibrate": {"images": 8},
        "reconstruct": {"epochs": 2, "images": 12, "batch_size": 4},
        "finetune": {"epochs": 0},
    }
    return Recipe.from_dict(told | changes)


def test_pictures_are_enough(pictures):
    told = Told()
    found = compress_recipe(recipe(pictures), pictures / "run", listener=told)
    assert "reconstruct" in told.begun
    assert "finetune" not in told.begun
    blocks = read_json(pictures / "run/reconstruct/outcome.json")["blocks"]
    assert blocks
    assert all(block["after"] <= block["before"] for block in blocks)
    assert found.report.met
    assert not any(row["key"] == "score" for row in found.report.facts["figures"]), "nobody said what is right"
    names = [row["name"] for row in found.report.facts["variants"]]
    assert names[-1] == "… reconstructed block by block"
    again = Told()
    compress_recipe(recipe(pictures), pictures / "run", listener=again)
    assert again.begun == []


def test_other_pictures_are_another_run(pictures):
    compress_recipe(recipe(pictures), pictures / "run")
    (pictures / "some").rename(pictures / "others")
    data = {"name": "pictures", "root": str(pictures / "others"), "batch_size": 4}
    told = Told()
    compress_recipe(recipe(pictures, data=data), pictures / "run", listener=told)
    assert {"search", "apply", "recalibrate", "reconstruct"} <= set(told.begun)


def test_no_picture_is_left_out_for_the_size_of_batches(pictures):
    data = {"name": "pictures", "root": str(pictures / "some"), "batch_size": 7}
    assert [len(batch) for batch in job_from(recipe(pictures, data=data)).samples(12)] == [6, 6]


def test_labelled_pictures_to_be_judged_on(pictures):
    data = {"name": "pictures", "root": str(pictures / "some"), "test_root": str(pictures / "val"), "batch_size": 4}
    found = compress_recipe(recipe(pictures, data=data), pictures / "run")
    score = next(row for row in found.report.facts["figures"] if row["key"] == "score")
    assert 0 <= score["after"] <= 100
    assert found.report.facts["data"]["test"] == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"finetune": {"epochs": 1}}, "pictures have no labels to fine-tune by; add --no-train"),
        ({"search": {"method": "genetic"}}, "method 'genetic' looks at labels"),
        ({"search": {"method": "haloc"}}, "method 'haloc' looks at labels"),
        ({"search": {"method": "sensitivity", "settings": {"measure": "loss"}}}, "measure 'loss' looks at labels"),
        ({"data": {"name": "pictures"}}, "needs data.root, a folder of pictures"),
        ({"data": {"name": "digits", "test_root": "x"}}, "data.test_root is for data.name = 'pictures'"),
        ({"data": {"name": "pictures", "root": "x", "cutout": 3}}, "are for fine-tuning"),
    ],
)
def test_what_does_not_go_together(pictures, changes, said):
    with pytest.raises(SpecError, match=said):
        job_from(recipe(pictures, **changes))


def test_reconstruction_before_fine_tuning(tmp_path):
    """Both may be had; fine-tuning starts from where reconstruction ended."""
    told = {"epochs": 2, "images": 64, "batch_size": 32}
    compress(tmp_path / "plain", reconstruct={})
    assert not (tmp_path / "plain/reconstructed").exists()
    found = compress(tmp_path / "both", reconstruct=told)
    assert [row["name"] for row in found.report.facts["variants"]][-2:] == [
        "… reconstructed block by block", "… and fine-tuned"
    ]  # fmt: skip

    again = Told()
    compress(tmp_path / "both", again, reconstruct=told | {"epochs": 3})
    assert again.begun == ["reconstruct", "finetune", "evaluate", "report"]
    with pytest.raises(SpecError, match=r"a recipe has no reconstruct.epoch.*Did you mean 'epochs'"):
        compress(tmp_path / "bad", reconstruct={"epoch": 1})


def test_no_train_is_laid_over_a_recipe(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('[budget]\nmacs = "50%"\n[finetune]\nepochs = 9\n')
    told = read_recipe(path, no_train=True)
    assert (told.finetune["epochs"], told.reconstruct["epochs"]) == (0, 10)
    assert read_recipe(path, ["reconstruct.epochs=3"], no_train=True).reconstruct["epochs"] == 3
    assert read_recipe(path, no_train=True, quick=True).reconstruct["epochs"] == 1
    assert read_recipe(path).reconstruct == {}
    assert told.search.method == "sensitivity"
    with pytest.raises(SpecError, match="method 'lc' looks at labels; for --no-train take 'sensitivity'"):
        read_recipe(path, ["search.method=lc"], no_train=True)
    with pytest.raises(SpecError, match="--no-train does without fine-tuning"):
        read_recipe(path, ["finetune.epochs=3"], no_train=True)
    path.write_text("[reconstruct]\nepochs = 0\nimages = 50\n")
    assert read_recipe(path, no_train=True, quick=True).reconstruct == {"epochs": 0, "images": 50}
    path.write_text("reconstruct = 5\n")
    with pytest.raises(SpecError, match="reconstruct"):
        read_recipe(path, no_train=True)
