from __future__ import annotations

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haloc.errors import FileFormatError, SpecError
from haloc.pipeline.flow import check_recipe
from haloc.pipeline.recipe import Recipe
from haloc.pipeline.recipe_file import put, read_recipe
from haloc.pipeline.template import TEMPLATE
from haloc.pipeline.toml import to_toml

FEW = """
[model]
name = "resnet20"
weights = "pretrained"
[budget]
macs = "50%"
[search]
method = "energy"
[finetune]
epochs = 3
"""


@pytest.fixture
def few(tmp_path):
    path = tmp_path / "few.toml"
    path.write_text(FEW)
    return path


def test_a_recipe_is_read(few):
    recipe = read_recipe(few)
    assert recipe.model.name == "resnet20"
    assert recipe.budget == {"macs": "50%"}
    assert recipe.search.method == "energy"
    assert recipe.finetune == {"epochs": 3}
    assert recipe.export.formats == ("onnx", "pt2")


def test_changes_are_read_as_toml_or_else_as_text(few):
    changes = ["search.method=sensitivity", "finetune.lr=0.01", "export.formats=['pt2']", "space.equal=false"]
    recipe = read_recipe(few, [*changes, "search.settings.images=64", "budget.params=40%", "data.root=a b"])
    assert recipe.search.method == "sensitivity"
    assert recipe.finetune == {"epochs": 3, "lr": 0.01}
    assert recipe.export.formats == ("pt2",)
    assert recipe.space.equal is False
    assert recipe.search.settings == {"images": 64}
    assert recipe.budget == {"macs": "50%", "params": "40%"}
    assert recipe.data.root == "a b"


def test_quick_leaves_no_warm_up_and_trains_nothing_that_is_not_trained(few):
    recipe = read_recipe(few, ["finetune.epochs=0"], quick=True)
    assert recipe.finetune["epochs"] == 0
    few.write_text("[budget]\nmacs = 0.5\n[finetune]\nepochs = 0\n")
    quick = read_recipe(few, quick=True)
    assert quick.search.settings == {"warmup_epochs": 0}
    assert quick.finetune == {"epochs": 0}
    check_recipe(quick)


def test_quick_lies_under_what_the_user_changes(few):
    recipe = read_recipe(few, ["finetune.epochs=2"], quick=True)
    assert recipe.finetune["epochs"] == 2
    assert recipe.data.images == 2000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("serch.method=energy", "no serch, .*Did you mean 'search'?"),
        ("search.metod=energy", "no search.metod, .*Did you mean 'method'?"),
        ("data.batch_size=many", "data.batch_size must be a whole number, got 'many'"),
        ("data.batch_size=2.5", "data.batch_size must be a whole number, got 2.5"),
        ("space.equal=1", "space.equal must be true or false, got 1"),
        ("space.forms=tucker2", "space.forms must be a list of texts, got 'tucker2'"),
        ("space.round_to=[8]", r"space.round_to must be a whole number or a text, got \[8\]"),
        ("budget.macs=[1]", "budget.macs is a share such as '60%'"),
        ("budget.macs=true", "budget.macs is a share such as '60%'"),
        ("export.formats=['onx']", "no export format 'onx', expected onnx or pt2. Did you mean 'onnx'?"),
        ("model=resnet20", "model must be a section with keys, got 'resnet20'"),
        ("model.name.first=1", "'name' is a value and not a section"),
        ("finetune", "section.key=value"),
        ("=3", "section.key=value"),
    ],
)
def test_a_mistake_is_named(few, change, said):
    with pytest.raises(SpecError, match=said):
        read_recipe(few, [change])


def test_int8_needs_onnx(few):
    with pytest.raises(SpecError, match="add 'onnx' to export.formats"):
        read_recipe(few, ["export.formats=['pt2']", "export.int8=true"])


def test_files_that_are_no_recipe(tmp_path):
    with pytest.raises(FileFormatError, match="there is no recipe .*haloc compress --new"):
        read_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(FileFormatError, match="is not TOML"):
        read_recipe(tmp_path / "bad.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(FileFormatError, match="cannot read"):
        read_recipe(tmp_path / "bytes.toml")


def test_what_is_written_is_read_back(few):
    recipe = read_recipe(few, ["search.settings.images=64", "data.mean=[0.5, 0.25]", "data.std=[1, 2]"])
    assert Recipe.from_dict(tomllib.loads(recipe.to_toml())) == recipe


def test_the_template_is_a_recipe_of_defaults(tmp_path):
    """What it has commented out are the defaults indeed."""
    (tmp_path / "new.toml").write_text(TEMPLATE)
    recipe = read_recipe(tmp_path / "new.toml")
    words = ("# loaders", "# root", "# images = 20000", "# test_images", "# loss", "# score", "# table", "# macs")
    words += ("# latency",)
    words += ("# params", "# energy", "# inputs", "# [", "# mean", "# std", "# ratio", "# plan", "# name", "# weights")
    words += ("# test_root", "# epochs = 10", "# images = 1024", "# responses")
    lines = [line for line in TEMPLATE.splitlines() if not line.startswith((*words, "# A recipe"))]
    spelled = tomllib.loads("\n".join(line.removeprefix("# ") for line in lines if not line.startswith("# inputs")))
    full = Recipe.from_dict(spelled)
    assert full.finetune.items() >= recipe.finetune.items()
    for part in ("model", "data", "target", "budget", "narrow", "space", "search", "recalibrate", "export", "run"):
        assert getattr(full, part) == getattr(recipe, part), part


PLAIN = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(), st.one_of(PLAIN, st.dictionaries(st.text(), PLAIN, max_size=3)), max_size=4))
def test_any_plain_values_survive_toml(values):
    assert tomllib.loads(to_toml(values)) == values


def test_putting_makes_sections():
    values: dict = {"a": {"b": 1}}
    put(values, "a.c", 2)
    put(values, "d.e.f", 3)
    assert values == {"a": {"b": 1, "c": 2}, "d": {"e": {"f": 3}}}
