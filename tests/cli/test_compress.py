from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from haloc.cost import sampling
from haloc.files import read_json

RECIPE = """
[model]
name = "tiny_models:make"
weights = "dense.safetensors"
[data]
name = "digits"
batch_size = 128
test_images = 200
[budget]
macs = "60%"
[space]
round_to = 2
[search]
method = "energy"
activations = 100
[finetune]
epochs = 1
lr = 0.01
warmup_epochs = 0
[export]
formats = ["onnx"]
samples = 32
"""


@pytest.fixture
def recipe(trained, monkeypatch):
    brief = sampling.Schedule(2, 2, 0.0, 0.0005, 2)
    monkeypatch.setattr(sampling, "SCHEDULES", dict.fromkeys(sampling.SCHEDULES, brief))
    (trained / "small.toml").write_text(RECIPE)
    return "small.toml"


def test_from_a_recipe_to_a_report(recipe, haloc):
    ran = haloc("compress", recipe, "--json")
    assert ran.code == 0, ran.err
    facts = json.loads(ran.out)
    assert facts["verdict"]["met"]
    assert facts["files"]["report"] == "runs/small/report.html"
    assert {row["key"] for row in facts["figures"]} >= {"score", "macs", "params", "file_bytes"}
    written = read_json("runs/small/report.json")
    assert written["figures"] == facts["figures"], "report and JSON have the same figures"
    assert "[12/12] report" in ran.err
    assert "small.onnx" not in ran.err
    assert "exported" not in ran.out
    page = Path("runs/small/report.html").read_text()
    assert written["verdict"]["text"] in page
    again = haloc("compress", recipe)
    assert again.code == 0
    assert again.err.count("done before") == 9
    assert "multiply-adds" in again.out
    assert "the report is runs/small/report.html" in again.err


def test_a_dry_run_writes_nothing(recipe, haloc):
    ran = haloc("compress", recipe, "--dry-run")
    assert ran.code == 0, ran.err
    assert "in all about" in ran.out
    assert not Path("runs").exists()
    told = json.loads(haloc("compress", recipe, "--dry-run", "--json").out)
    assert [stage["name"] for stage in told["stages"]][:2] == ["narrow", "inspect"]


def test_changes_and_the_quick_way(recipe, haloc):
    ran = haloc("compress", recipe, "--quick", "--set", "export.formats=[]", "--output", "elsewhere")
    assert ran.code == 0, ran.err
    assert "images = 2000" in Path("elsewhere/recipe.toml").read_text()


def test_a_new_recipe_is_one(tiny, haloc, refused):
    assert haloc("compress", "--new", "mine.toml").code == 0
    assert "[budget]" in Path("mine.toml").read_text()
    assert "is there already" in refused("compress", "--new", "mine.toml", code=2)


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (("--set", "serch.method=energy"), 2, "Did you mean 'search'?"),
        (("--set", "search.method=enrgy"), 2, "Did you mean 'energy'?"),
        (("--set", "finetune.epoch=3"), 2, "Did you mean 'epochs'?"),
        (("--set", "data.name=digts"), 2, "Did you mean 'digits'?"),
        (("--set", "model.name=tiny_models:mak"), 2, "Did you mean 'make'?"),
        (("--set", "model.weights=none.safetensors"), 1, "does not exist"),
        (("--set", "target.name=cpu:onnxruntim"), 2, "Did you mean 'onnxruntime'?"),
        (("--set", "target.table=none.json"), 1, "no file none.json"),
        (("--set", "budget.macs=1%"), 3, "cannot be reached"),
        (("--set", "budget.latency=50%"), 2, "needs a target"),
        (("--set", "run.device=cuda:9"), 2, "cannot be used here"),
        (("--set", "task.loss=tiny_models:loss"), 2, "has no 'loss'"),
        (("--set", "data.loaders=tiny_models:make"), 2, "leave one of them out"),
        (("--output", "small.toml"), 1, "is a file"),
    ],
)
def test_mistakes(recipe, refused, more, code, said):
    assert said in refused("compress", recipe, *more, code=code)


def test_files_that_are_no_recipe(tiny, refused):
    assert "haloc compress --new" in refused("compress", "none.toml", code=1)
    (tiny / "bad.toml").write_text("[")
    assert "not TOML" in refused("compress", "bad.toml", code=1)


def test_a_missing_package(recipe, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert "pip install 'haloc[onnx]'" in refused("compress", recipe, code=1)


def test_a_full_disk(recipe, refused, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert "No space left on device" in refused("compress", recipe, code=1)


def test_ctrl_c_says_how_to_go_on(recipe):
    """From another process, as a terminal would."""
    command = [sys.executable, "-m", "haloc", "compress", recipe, "--set", "finetune.epochs=100000"]
    # A shell may have told us to ignore the signal, and children inherit that.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, **heard) as run:
        deadline = time.monotonic() + 120
        while not Path("runs/small/finetune/log.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    assert run.returncode == 130, said
    assert said.strip().splitlines()[-1] == (
        "haloc: interrupted; what was done is kept, run the same command again to go on"
    )
    assert "Traceback" not in said


def test_a_report_is_shown_and_written_anew(recipe, haloc, refused):
    assert haloc("compress", recipe, "--set", "export.formats=[]").code == 0
    Path("runs/small/report.html").unlink()
    ran = haloc("report", "runs/small")
    assert ran.code == 0, ran.err
    assert Path("runs/small/report.html").exists()
    assert haloc("report", "runs/small", "--output", "summary.md").code == 0
    assert "|" in Path("summary.md").read_text()
    assert json.loads(haloc("report", "runs/small/report.json", "--json").out)["kind"] == "haloc-report"
    assert "writes it at its end" in refused("report", "runs/none", code=1)
    Path("other.json").write_text("{}")
    assert "not a report" in refused("report", "other.json", code=1)
    assert ".html or .md" in refused("report", "runs/small", "--output", "report.pdf", code=1)


def test_recipes_are_compared_over_seeds(recipe, haloc, refused):
    Path("other.toml").write_text(RECIPE.replace('method = "energy"', 'method = "uniform"'))
    few = ("--set", "export.formats=[]", "--set", "data.images=256")
    ran = haloc("compress", recipe, "other.toml", "--seeds", 2, "--json", "--output", "both", *few)
    assert ran.code == 0, ran.err
    rows = {row["name"]: row for row in json.loads(ran.out)["rows"]}
    assert {name: row["method"] for name, row in rows.items()} == {"small": "energy", "other": "uniform"}
    assert all(row["seeds"] == [0, 1] and row["met"] for row in rows.values())
    written = read_json("both/comparison.json")
    assert written["rows"] == list(rows.values())
    one = read_json("both/other/seed-1/report.json")
    score = next(row["after"] for row in one["figures"] if row["key"] == "score")
    assert score == rows["other"]["figures"]["score"]["values"][1]
    again = haloc("compress", recipe, "other.toml", "--seeds", 2, "--output", "both", *few)
    assert again.code == 0, again.err
    assert "done before" in again.err
    assert "small" in again.out
    assert "±" in again.out
    assert "--dry-run is for one recipe, got 2" in refused("compress", recipe, "other.toml", "--dry-run", code=2)
    Path("folder").mkdir()
    Path("folder/other.toml").write_text(RECIPE)
    assert "told apart by their names" in refused("compress", "other.toml", "folder/other.toml", code=2)


def test_a_recipe_that_fails_is_told_after_the_others_are_done(recipe, haloc):
    Path("other.toml").write_text(RECIPE.replace('macs = "60%"', 'macs = "0.01%"'))
    ran = haloc("compress", "other.toml", recipe, "--set", "export.formats=[]", "--set", "finetune.epochs=0")
    assert ran.code == 1
    assert "Traceback" not in ran.err
    assert "runs/other: a budget of" in ran.err
    assert [row["name"] for row in read_json("runs/comparison.json")["rows"]] == ["small"]


def test_a_recipe_that_misses_its_budget_is_told_in_the_comparison(recipe, haloc):
    few = ("--set", "export.formats=[]", "--set", "finetune.epochs=0")
    assert haloc("compress", recipe, "--output", "first", *few).code == 0
    ran = haloc(
        "compress", recipe, "--seeds", 2, *few, "--set", "search.plan=first/plan.json", "--set", "budget.macs=30%"
    )
    assert ran.code == 3
    assert "a budget is not met: small" in ran.err
