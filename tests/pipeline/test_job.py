"""What a recipe names: a user's own network, loaders, loss and score."""

from __future__ import annotations

import sys

import pytest
import torch

from haloc.errors import HalocError, SpecError
from haloc.files import read_json
from haloc.pipeline.flow import compress_recipe
from haloc.pipeline.job import job_from
from haloc.pipeline.recipe import Recipe
from tests.pipeline.small import Told

MINE = """
import torch
from torch import nn
from torch.nn import functional as F

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.mask, self.share = nn.Conv2d(16, 1, 1), nn.Linear(16, 1)

    def forward(self, picture):
        features = self.body(picture)
        return {"mask": self.mask(features), "share": self.share(features.mean((2, 3)))}

def batch(seed):
    picture = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return {"picture": picture, "wanted": (picture > 0).float()}

def make_loaders():
    return {"train": [batch(n) for n in range(4)], "val": [batch(9)]}

def pair():
    return [batch(0)], [batch(1)]

def wrong_names():
    return {"training": []}

def wrong_kind():
    return 3

def loss(model, batch):
    said = model(batch["picture"])
    return {"mask": F.binary_cross_entropy_with_logits(said["mask"], batch["wanted"]),
            "share": F.mse_loss(said["share"][:, 0], batch["wanted"].mean((1, 2, 3)))}

def inputs(batch):
    return batch["picture"]

def score(model):
    held = batch(99)
    return float(((model(held["picture"])["mask"] > 0) == (held["wanted"] > 0)).float().mean())

SCORE = 3
"""
RECIPE = {
    "model": {"name": "mine_for_recipes:Two"},
    "data": {"loaders": "mine_for_recipes:make_loaders"},
    "task": {"loss": "mine_for_recipes:loss", "score": "mine_for_recipes:score", "inputs": "mine_for_recipes:inputs",
             "score_name": "hits"},
    "budget": {"macs": "60%"},
    "space": {"round_to": 4},
    "search": {"method": "sensitivity", "activations": 32, "settings": {"images": 16}},
    "finetune": {"epochs": 1, "lr": 0.01, "warmup_epochs": 0},
    "export": {"formats": ["pt2"], "samples": 8},
}  # fmt: skip


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_for_recipes.py").write_text(MINE)
    yield tmp_path
    sys.modules.pop("mine_for_recipes", None)


def changed(**sections: dict) -> Recipe:
    return Recipe.from_dict({**RECIPE, **{name: RECIPE.get(name, {}) | part for name, part in sections.items()}})


def test_a_task_of_ones_own_from_a_recipe(mine):
    found = compress_recipe(changed(), mine / "run")
    score = found.report.facts["figures"][0]
    assert score["name"] == "hits"
    assert score["unit"] == ""
    assert 0 <= score["after"] <= 1
    assert set(found.model(torch.zeros(3, 1, 8, 8))) == {"mask", "share"}
    history = found.report.facts["finetune"]["history"]
    assert {"mask", "share", "distillation", "val_score"} <= set(history[0])
    assert read_json(mine / "run/figures.json")["scores"].keys() >= {"dense", "applied", "finetuned"}


def test_an_edited_loss_is_another_run(mine):
    compress_recipe(changed(), mine / "run")
    sys.modules.pop("mine_for_recipes")
    text = MINE.replace("F.mse_loss(", "2 * F.mse_loss(")
    (mine / "mine_for_recipes.py").write_text(text + "\n# younger\n")
    compress_recipe(changed(), mine / "run", told := Told())
    assert "finetune" in told.begun


def test_edited_loaders_are_another_run(mine):
    compress_recipe(changed(), mine / "run")
    sys.modules.pop("mine_for_recipes")
    (mine / "mine_for_recipes.py").write_text(MINE.replace("batch(n) for n", "batch(n + 1) for n") + "\n# younger\n")
    compress_recipe(changed(), mine / "run", told := Told())
    assert "search" in told.begun
    assert "inspect" not in told.begun


def test_two_loaders_in_a_row(mine):
    job = job_from(changed(data={"loaders": "mine_for_recipes:pair"}))
    assert job.test is None
    assert job.val[0]["picture"].shape == (16, 1, 8, 8)
    assert job.example.shape == (1, 1, 8, 8)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {"loaders": "mine_for_recipes:wrong_names"}}, "train, val and test, got training"),
        ({"data": {"loaders": "mine_for_recipes:wrong_kind"}}, "two or three loaders"),
        ({"data": {"loaders": "mine_for_recipes:mak_loaders"}}, "Did you mean 'make_loaders'?"),
        ({"data": {"name": "digits"}}, "leave one of them out"),
        ({"task": {"score": "mine_for_recipes:SCORE"}}, "task.score: .* is a int, expected a function"),
        ({"task": {"loss": "nothing"}}, "package.module:callable"),
        ({"model": {"name": None}}, "names no model"),
    ],
)
def test_what_is_named_wrongly(mine, sections, said):
    with pytest.raises(SpecError, match=said):
        job_from(changed(**sections))


def test_a_loader_that_fails_is_told(mine):
    (mine / "mine_for_recipes.py").write_text(MINE + "\ndef broken():\n    raise OSError('no such disk')\n")
    with pytest.raises(HalocError, match="no such disk"):
        job_from(changed(data={"loaders": "mine_for_recipes:broken"}))
