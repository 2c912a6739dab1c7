"""What a file may name and must not run: programs, callables, models; and recipes of odd kinds."""

from __future__ import annotations

import json
import zipfile

import pytest
from torch import nn

import haloc
from haloc.artifact.runtime import open_exported
from haloc.artifact.store import load, save
from haloc.errors import HalocError, SpecError
from haloc.pipeline.recipe_file import read_recipe
from tests.strangers import hostile
from tests.strangers.hostile import written

# Programs


def test_a_program_of_torch_is_opened_only_where_it_is_trusted(tmp_path):
    with zipfile.ZipFile(tmp_path / "small.pt2", "w") as archive:
        archive.writestr("model/data.pkl", hostile.evil_pickle(tmp_path / "ran"))
    with pytest.raises(SpecError, match="can run any code when it is opened; .*--trust"):
        open_exported(tmp_path / "small.pt2")
    assert not (tmp_path / "ran").exists()


def test_nothing_that_a_saved_network_names_is_imported(tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    spec = "evil_module:make"
    recipe = {"model": {"name": spec}, "data": {"loaders": spec}, "task": {"loss": spec}}
    save(tmp_path / "saved", nn.Linear(2, 2), provenance={"recipe": recipe, "model": spec, "classes": spec})
    card = json.loads((tmp_path / "saved" / "model.json").read_text())
    (tmp_path / "saved" / "model.json").write_text(json.dumps(card | {"model": spec, "callable": spec}))
    assert isinstance(load(tmp_path / "saved", nn.Linear(2, 2)), nn.Linear)
    with pytest.raises(SpecError, match="there is no model"):
        haloc.create(str(tmp_path / "saved"))
    assert not (tmp_path / "ran").exists()


# Recipes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("finetune = 3", "finetune' is a value and not a section|finetune must be a section"),
        ("finetune = []", "finetune' is a value and not a section|finetune must be a section"),
        ("search = 1979-05-27", "search' is a value and not a section|search must be a section"),
        ("[data]\nbatch_size = 07:32:00", "data.batch_size must be a whole number"),
        ("[target]\nmargin = nan", "target.margin"),
        ("[target]\nmargin = 1" + "0" * 400, "target.margin must be"),
        ("[run]\nseed = 1" + "0" * 400, "run.seed must be"),
        ("[budget]\nmacs = [1]", "budget.macs"),
        ("[budget]\nmacs = 1" + "0" * 5000, "is not TOML"),
        ("x = " + "[" * 5000, "too deep"),
        ("[[model]]\nname = 'a'", "model must be a section"),
        ("'' = 1", "a recipe has no"),
        ("a = '" + "b" * (2 << 20) + "'", "too large"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"quick": True}, {"no_train": True}], ids=["plain", "quick", "no-train"])
def test_a_recipe_of_odd_kinds_is_refused(tmp_path, text, said, options):
    with pytest.raises(HalocError, match=said) as caught:
        read_recipe(written(tmp_path / "recipe.toml", text), **options)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "key", ["model.name", "teacher.name", "data.loaders", "task.loss", "task.score", "task.inputs"]
)
def test_a_recipe_that_names_code_is_refused_where_none_is_wanted(tmp_path, key, monkeypatch):
    (tmp_path / "evil_module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    section, name = key.split(".")
    recipe = written(tmp_path / "recipe.toml", f"[{section}]\n{name} = 'evil_module:make'")
    with pytest.raises(SpecError, match=f"{key} = 'evil_module:make'"):
        read_recipe(recipe, no_code=True)
    read_recipe(recipe)  # reading by itself imports nothing
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["data.loaders", "task.loss", "task.score", "task.inputs"])
def test_what_is_named_like_a_library_is_code_unless_it_is_a_network(tmp_path, key):
    section, name = key.split(".")
    recipe = written(tmp_path / "recipe.toml", f"[{section}]\n{name} = 'timm:go'")
    with pytest.raises(SpecError, match=f"{key} = 'timm:go'"):
        read_recipe(recipe, no_code=True)


def test_a_recipe_without_code_is_read_where_none_is_wanted(tmp_path):
    recipe = written(tmp_path / "recipe.toml", "[model]\nname = 'torchvision:resnet18'\n[teacher]\nname = 'resnet20'")
    assert read_recipe(recipe, no_code=True).model.name == "torchvision:resnet18"


@pytest.mark.parametrize("classes", [10**12, "ten", -1, True, [1]])
def test_a_saved_network_cannot_ask_for_a_last_layer_without_end(tmp_path, classes, refused):
    save(tmp_path / "saved", nn.Linear(2, 2), provenance={"classes": classes})
    arguments = ("export", "resnet20", "--from", tmp_path / "saved", "--output", tmp_path / "small.onnx")
    assert "classes, which cannot be" in refused(*arguments, code=1)


def test_a_program_is_refused_on_the_command_line_too(tmp_path, refused):
    written(tmp_path / "small.pt2", hostile.evil_pickle(tmp_path / "ran"))
    said = refused("evaluate", "resnet20", "--data", "digits", "--from", tmp_path / "small.pt2", code=2)
    assert "--trust" in said
    assert not (tmp_path / "ran").exists()
