"""Every verb with a wrong file, a wrong name, a missing package, a full disk: one sentence and the documented code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from haloc.cli import app, complete
from haloc.cost import sampling
from haloc.cost.table import Row, Table
from haloc.cost.target import DTYPES, RUNTIMES, Target
from haloc.factor.inspect import inspect
from haloc.methods.search import METHODS
from haloc.plan import Plan
from haloc.space import rank_space
from haloc.zoo.data import _LOADERS
from haloc.zoo.registry import names

MODEL = ("tiny_models:make", "--weights", "dense.safetensors")
INPUT = ("--input", "1x1x8x8")
DIGITS = ("--data", "digits")
BRIEF = ("--epochs", 1, "--batch-size", 256, "--warmup-epochs", 0, "--no-test")
#: Every verb with what it needs, and nothing wrong.
RIGHT: dict[str, tuple[object, ...]] = {
    "inspect": ("inspect", *MODEL, *INPUT, "--output", "layers.json"),
    "measure": ("measure", *MODEL, *INPUT, "--round-to", 4, "--networks", 0, "--output", "new.json"),
    "predict": ("predict", *MODEL, *INPUT, "--plan", "plan.json", "--table", "table.json"),
    "search": ("search", *MODEL, *INPUT, "--method", "energy", "--budget", "60%", "--round-to", 4, "--output", "found"),
    "apply": ("apply", *MODEL, "--plan", "plan.json", "--output", "small"),
    "evaluate": ("evaluate", *MODEL, *DIGITS),
    "train": ("train", MODEL[0], *DIGITS, *BRIEF, "--output", "run"),
    "finetune": ("finetune", *MODEL, "--plan", "plan.json", *DIGITS, *BRIEF, "--calibrate", 50, "--output", "tuned"),
    "export": ("export", *MODEL, *INPUT, "--output", "small.pt2"),
    "compress": ("compress", "recipe.toml", "--output", "all"),
    "report": ("report", "report.json"),
}
RECIPE = """
[model]
name = "tiny_models:make"
weights = "dense.safetensors"
inputs = ["1x1x8x8"]
[budget]
macs = "60%"
[space]
round_to = 4
[search]
method = "energy"
[export]
formats = []
"""


@pytest.fixture
def ready(tiny, monkeypatch):
    brief = sampling.Schedule(2, 2, 0.0, 0.0005, 2)
    monkeypatch.setattr(sampling, "SCHEDULES", dict.fromkeys(sampling.SCHEDULES, brief))
    monkeypatch.syspath_prepend(str(tiny))
    sys.modules.pop("tiny_models", None)
    import tiny_models

    torch.manual_seed(0)
    save_file(tiny_models.make().state_dict(), "dense.safetensors")
    Path("plan.json").write_text(
        json.dumps(Plan({}).to_dict() | {"layers": {"3": {"form": "tucker2", "rank_out": 4, "rank_in": 4}}})
    )
    Path("recipe.toml").write_text(RECIPE)
    layers = inspect(tiny_models.make(), torch.zeros(1, 1, 8, 8))
    rows = tuple(Row(shape, form, 1.0) for shape, form in rank_space(layers, round_to=4).rows())
    Table(Target(), rows, {"device": "made up"}).save("table.json")
    return tiny


def test_every_verb_is_here():
    assert set(RIGHT) == {command.name for command in app.registered_commands}


def changed(verb: str, old: object, new: object) -> tuple[object, ...]:
    assert old in RIGHT[verb]
    return tuple(new if word == old else word for word in RIGHT[verb])


@pytest.mark.parametrize("verb", [verb for verb, words in RIGHT.items() if MODEL[0] in words])
def test_a_model_that_is_not_there(ready, refused, verb):
    assert "Did you mean 'make'?" in refused(*changed(verb, MODEL[0], "tiny_models:mak"), code=2)
    assert "Did you mean 'resnet20'?" in refused(*changed(verb, MODEL[0], "resnt20"), code=2)


@pytest.mark.parametrize(
    ("verb", "file", "code"),
    [(verb, "dense.safetensors", 1) for verb, words in RIGHT.items() if "dense.safetensors" in words]
    + [(verb, "plan.json", 1) for verb, words in RIGHT.items() if "plan.json" in words]
    + [("predict", "table.json", 1), ("compress", "recipe.toml", 1), ("report", "report.json", 1)],
)
def test_a_file_that_is_not_there_or_is_something_else(ready, refused, verb, file, code):
    Path(file).unlink(missing_ok=True)
    assert Path(file).stem in refused(*RIGHT[verb], code=code)
    Path(file).write_bytes(b"\x00\xff no such thing")
    assert Path(file).stem in refused(*RIGHT[verb], code=code)


@pytest.mark.parametrize("verb", [verb for verb in RIGHT if verb not in ("predict", "evaluate", "report")])
def test_a_full_disk(ready, refused, monkeypatch, verb):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        patch.setattr(os, "replace", full)
        assert "No space left on device" in refused(*RIGHT[verb], code=1)
    left = {path.name for path in Path.cwd().rglob("*") if path.is_file()}
    assert not {name for name in left if name.startswith(".") and name != ".lock"}, "nothing half written is left"


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (("measure", *MODEL, *INPUT, "--target", "cpu:onnxruntime"), "onnxruntime", "onnx"),
        (("measure", *MODEL, *INPUT, "--target", "cpu:openvino"), "openvino", "openvino"),
        (("export", *MODEL, *INPUT, "--output", "small.onnx"), "onnxscript", "onnx"),
        (("compress", "recipe.toml", "--set", "export.formats=['onnx']"), "onnxscript", "onnx"),
        ((*RIGHT["search"], "--figures"), "matplotlib", "plot"),
        (("inspect", "timm:resnet18"), "timm", "timm"),
    ],
)
def test_a_package_that_is_missing(ready, refused, monkeypatch, words, package, extra):
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert f"pip install 'haloc[{extra}]'" in refused(*words, code=1)


@pytest.mark.parametrize("verb", ["search", "compress"])
def test_a_budget_that_cannot_be_reached(ready, refused, verb):
    words = changed("search", "60%", "1%") if verb == "search" else (*RIGHT["compress"], "--set", "budget.macs=1%")
    assert "cannot be reached" in refused(*words, code=3)


@pytest.mark.parametrize("verb", RIGHT)
def test_an_option_that_does_not_exist(ready, haloc, verb):
    ran = haloc(*RIGHT[verb], "--jsn")
    assert ran.code == 2
    assert "--jsn" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize("verb", RIGHT)
def test_help_has_two_examples(ready, haloc, verb):
    ran = haloc(verb, "--help")
    assert ran.code == 0
    assert ran.out.count(f"haloc {verb}") >= 2


def test_help_does_not_wait_for_torch():
    check = (
        "import sys; sys.argv = ['haloc', '--help']\nfrom haloc.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    )
    check += "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_what_the_shell_offers_is_what_there_is():
    assert names() == complete.MODELS
    assert complete.METHODS == METHODS
    assert tuple(_LOADERS) == complete.DATA
    for device in ("cpu", "cuda"):
        for part in complete.PARTS:
            if part in RUNTIMES[device]:
                assert Target.parse(f"{device}:{part}").runtime == part
    assert set(complete.PARTS) >= {word for words in RUNTIMES.values() for word in words} - {"model"}
    assert set(complete.PARTS) >= {words[0] for words in DTYPES.values()}


def test_completion():
    assert complete.among(complete.MODELS)("resnet5") == ["resnet56", "resnet50"]
    assert complete.target("c") == ["cpu", "cuda"]
    assert complete.target("cpu:on") == ["cpu:onnxruntime"]
    words = {"COMP_WORDS": "haloc search --method en", "COMP_CWORD": "3", "_HALOC_COMPLETE": "complete_bash"}
    ran = subprocess.run(
        [sys.executable, "-m", "haloc"], env=os.environ | words, capture_output=True, text=True, check=False
    )
    assert ran.stdout.split() == ["energy"], ran.stderr
