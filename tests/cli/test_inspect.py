from __future__ import annotations

import json
import subprocess
import sys

import pytest

from haloc.inventory import Inventory


def test_a_table_for_people(haloc):
    ran = haloc("inspect", "resnet20")
    assert ran.code == 0
    assert "20 of 20 layers can be factorised, 100% of the MACs" in ran.out
    assert "layer3.2.conv2" in ran.out
    assert "40.6 M" in ran.out
    assert ran.err == ""


def test_reasons_are_in_the_table(haloc):
    assert "left alone: depthwise" in haloc("inspect", "mobilenet_v2", "--input", "1x3x64x64").out


def test_json_for_machines_and_a_file(haloc, tmp_path):
    ran = haloc("inspect", "resnet20", "--json", "--output", tmp_path / "layers.json")
    assert Inventory.from_dict(json.loads(ran.out)) == Inventory.load(tmp_path / "layers.json")
    assert ran.err.strip().replace("\n", "").endswith("layers.json")


def test_a_model_of_the_users_own(haloc, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "class Two(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embed, self.fc = nn.Embedding(4, 16), nn.Linear(16, 16)\n"
        "    def forward(self, ids, scale):\n"
        "        return self.fc(self.embed(ids)) * scale\n"
    )
    monkeypatch.chdir(tmp_path)
    for inputs in (("2x5:int64", "2x1x1"), ("ids=2x5:int64", "scale=2x1x1:float32")):
        ran = haloc("inspect", "mine:Two", *(f"--input={text}" for text in inputs), "--json")
        assert json.loads(ran.out)["macs"] == 5 * 16 * 16


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("resnt20",), "Did you mean 'resnet20'"),
        (("nowhere.module:make",), "nowhere.module"),
        (("json:dumps",), "json:dumps"),
        (("torch.nn:Sequental",), "Did you mean 'Sequential'"),
        (("torch.nn:Identity",), "--input 1x3x224x224"),
        (("resnet20", "--input", "3by32"), "spelled like 1x3x224x224"),
        (("resnet20", "--input", "1x3x0x32"), "spelled like 1x3x224x224"),
        (("resnet20", "--input", "1x3x32x32:flot32"), "Did you mean 'float32'"),
        (("resnet20", "--input", "1x3x32x32", "--input", "y=1x2"), "or none of them"),
    ],
)
def test_mistakes_in_words_are_answered_in_one_sentence(refused, arguments, text):
    assert text in refused("inspect", *arguments, code=2)


class Missing:
    """Makes a library look as if it were not installed."""

    def __init__(self, library):
        self.library = library

    def find_spec(self, name, path=None, target=None):
        if name == self.library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_a_library_that_is_not_installed_is_named_with_its_extra(refused, monkeypatch, library):
    for loaded in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Missing(library), *sys.meta_path])
    assert f"pip install 'haloc[{library}]'" in refused("inspect", f"{library}:resnet18", code=1)


@pytest.mark.parametrize(
    ("shape", "text"),
    [("1x4x32x32", "does not run on the inputs given (1×4×32×32 float32)"), ("32", "does not run")],
)
def test_inputs_that_the_model_does_not_take(refused, shape, text):
    assert text in refused("inspect", "resnet20", "--input", shape, code=1)


def test_weights_that_are_missing_or_foreign(refused, tmp_path):
    assert "none.safetensors" in refused("inspect", "resnet20", "--weights", tmp_path / "none.safetensors", code=1)
    (tmp_path / "text.pth").write_text("no weights")
    assert "text.pth" in refused("inspect", "resnet20", "--weights", tmp_path / "text.pth", code=1)


def test_an_output_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot write" in refused("inspect", "resnet20", "--output", tmp_path / "file" / "layers.json", code=1)


def test_usage_errors_have_exit_code_2(haloc):
    for arguments in (("inspct",), ("inspect",), ("inspect", "resnet20", "--jsn")):
        ran = haloc(*arguments)
        assert ran.code == 2
        assert "Traceback" not in ran.err
    assert "Did you mean 'inspect'" in haloc("inspct").err


@pytest.mark.parametrize("verb", ["inspect", "evaluate"])
def test_help_has_two_examples(haloc, verb):
    ran = haloc(verb, "--help")
    assert ran.code == 0
    assert ran.out.count(f"haloc {verb} ") >= 2


def test_the_package_can_be_run():
    ran = subprocess.run([sys.executable, "-m", "haloc", "--version"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0
    assert ran.stdout.startswith("haloc 0.")


def test_version_and_bare_call(haloc):
    assert haloc("--version").out.startswith("haloc 0.")
    ran = haloc()
    assert "inspect" in ran.out + ran.err
    assert "evaluate" in ran.out + ran.err
