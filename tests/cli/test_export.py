from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from haloc.artifact.runtime import open_exported
from haloc.artifact.store import load, save
from haloc.cost import sampling
from haloc.factor.surgery import apply_plan
from haloc.forms import Tucker2
from tests.cli.conftest import TINY

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


def make() -> nn.Module:
    space: dict = {}
    exec(TINY, space)
    return space["make"]()


@pytest.fixture
def folder(tiny, monkeypatch):
    """The folder of the tiny models, with one of them factorised and saved; timing takes no time."""
    torch.manual_seed(3)
    save("small", apply_plan(make(), {"3": Tucker2(4, 4)}))
    brief = sampling.Schedule(2, 2, 0.0, 0.001, 2)
    monkeypatch.setattr(sampling, "SCHEDULES", dict.fromkeys(sampling.SCHEDULES, brief))
    return tiny


def run(haloc, *arguments):
    return haloc("export", "tiny_models:make", "--from", "small", "--input", "1x1x8x8", *arguments)


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_a_saved_network_becomes_a_file(haloc, folder, suffix):
    target = "cpu:onnxruntime:b4:t1" if suffix == "onnx" else "cpu:b4:t1"
    ran = run(haloc, "--output", f"small.{suffix}", "--target", target, "--json")
    assert ran.code == 0, ran
    result = json.loads(ran.out)
    assert (result["format"], result["dynamic_batch"], result["from"]) == (suffix, True, "small")
    assert result["parity"]["random"]["relative"] < 1e-4
    assert result["latency_ms"]["fp32"][0] > 0
    assert "Warning" not in ran.err
    small, digits = load("small", make()), torch.rand(3, 1, 8, 8)
    assert torch.allclose(open_exported(f"small.{suffix}", trust=True)(digits), small(digits), atol=1e-5)


def test_a_table_with_accuracy_and_eight_bits(haloc, folder):
    arguments = ("--data", "digits", "--int8", "--samples", 100, "--limit", 200, "--output", "small.onnx")
    ran = run(haloc, *arguments, "--target", "cpu:onnxruntime:b8:t1")
    assert ran.code == 0, ran
    assert "tiny_models:make (from small), timed on cpu:onnxruntime:fp32:b8:t1" in ran.out
    assert all(word in ran.out for word in ("small.onnx", "small.int8.onnx", "any", "±"))
    result = json.loads(run(haloc, *arguments, "--json").out)
    assert set(result["top1"]) == {"fp32", "int8"}
    assert set(result["parity"]) == {"random", "real"}
    assert result["int8"]["samples"] >= 100
    assert result["latency_ms"] == {}
    assert sorted(path.name for path in Path().glob("*.onnx")) == ["small.int8.onnx", "small.onnx"]


def test_a_dense_model_at_a_fixed_batch(haloc, folder):
    ran = haloc(
        "export", "tiny_models:make", "--input", "x=1x1x8x8", "--batch-size", 4, "--fixed-batch", "--output", "d.onnx"
    )  # fmt: skip
    assert ran.code == 1
    assert "unexpected keyword argument" in ran.err
    ran = haloc("export", "tiny_models:make", "--input", "1x1x8x8", "--batch-size", 4, "--fixed-batch",
                "--output", "d.onnx", "--json")  # fmt: skip
    result = json.loads(ran.out)
    assert (result["dynamic_batch"], list(result["inputs"].values())) == (False, [[4, 1, 8, 8]])
    assert result["from"] is None


def test_files_and_folders_are_evaluated(haloc, refused, folder):
    for suffix in ("onnx", "pt2"):
        assert run(haloc, "--output", f"small.{suffix}").code == 0
    base = ("evaluate", "tiny_models:make", "--data", "digits", "--limit", 100)
    assert "can run any code when it is opened" in refused(*base, "--from", "small.pt2", code=2)
    sources = (("small",), ("small.onnx",), ("small.pt2", "--trust"))
    found = [json.loads(haloc(*base, "--from", *source, "--json").out) for source in sources]
    assert [result["loss"] for result in found] == pytest.approx([found[0]["loss"]] * 3, rel=1e-4)
    assert [result["params"] for result in found[1:]] == [None, None]
    assert found[0]["params"] < found[0]["params_dense"]
    assert "(from small.onnx)" in haloc(*base, "--from", "small.onnx").out
    assert "leave --plan out, or --from" in refused(*base, "--from", "small", "--plan", "p.json", code=2)
    assert "leave --recalibrate" in refused(*base, "--from", "small.onnx", "--recalibrate", 10, code=2)
    assert "there is no file none.onnx" in refused(*base, "--from", "none.onnx", code=1)
    assert "none: it does not exist" in refused(*base, "--from", "none", code=1)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--output", "small.tflite"), 2, ".onnx or .pt2, got 'small.tflite'"),
        (("--output", "a.onnx", "--from", "none"), 1, "none: it does not exist"),
        (("--output", "a.onnx", "--weights", "w.pt"), 2, "leave --weights out, or --from"),
        (("--output", "a.onnx", "--int8"), 2, "give --data and an .onnx --output"),
        (("--output", "a.pt2", "--int8", "--data", "digits"), 2, "give --data and an .onnx --output"),
        (("--output", "a.onnx", "--target", "cpu:b1"), 2, "eager runs .pt2 files"),
        (("--output", "a.pt2", "--target", "cpu:onnxruntim"), 2, "Did you mean 'onnxruntime'"),
        (("--output", "a.onnx", "--data", "digit"), 2, "Did you mean 'digits'"),
        (("--output", "a.onnx", "--input", "1x1x8"), 1, "does not run on the inputs given"),
        (("--output", "small/model.json/a.onnx"), 1, "cannot write small/model.json/a.onnx"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(refused, folder, arguments, code, text):
    base = ("export", "tiny_models:make")
    base += () if "--from" in arguments else ("--from", "small")
    base += () if "--input" in arguments else ("--input", "1x1x8x8")
    assert text in refused(*base, *arguments, code=code)
    assert not list(Path().glob("a.*"))


def test_another_model(refused, folder):
    arguments = ("--from", "small", "--input", "1x1x8x8", "--output", "a.onnx")
    assert "small/weights.safetensors does not fit the model: '7." in refused(
        "export", "tiny_models:few", *arguments, code=1
    )


def test_a_missing_extra(refused, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    arguments = ("--from", "small", "--input", "1x1x8x8", "--output", "a.onnx")
    assert "pip install 'haloc[onnx]'" in refused("export", "tiny_models:make", *arguments, code=1)


@pytest.mark.parametrize("verb", ["apply", "export"])
def test_help_has_two_examples(haloc, verb):
    ran = haloc(verb, "--help")
    assert ran.code == 0
    assert ran.out.count(f"haloc {verb} resnet20") == 2
