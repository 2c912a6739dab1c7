from __future__ import annotations

import pytest
import torch
from torch import nn

from haloc.artifact.export import export
from haloc.artifact.parity import compare
from haloc.artifact.runtime import OnnxModule, open_exported, time_files
from haloc.cost import sampling
from haloc.cost.target import Target
from haloc.errors import CostError, ExportError, FileFormatError, MissingExtraError, ModelError, SpecError
from haloc.training.evaluate import evaluate
from tests.artifact.networks import Branches, Odd, images

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A network of several inputs and one of one, in both formats."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    models = {"odd": Odd().eval(), "branches": Branches().eval()}
    for suffix in ("onnx", "pt2"):
        export(models["odd"], folder / f"odd.{suffix}", images())
        export(models["branches"], folder / f"branches.{suffix}", (images(), torch.ones(2, 8)))
    return folder, models


@pytest.fixture
def brief(monkeypatch):
    schedule = sampling.Schedule(2, 2, 0.0, 0.001, 2)
    monkeypatch.setattr(sampling, "SCHEDULES", dict.fromkeys(sampling.SCHEDULES, schedule))


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_files_are_evaluated_like_models(files, suffix):
    folder, models = files
    batches = [(images(batch), torch.arange(batch)) for batch in (4, 3)]
    opened = open_exported(folder / f"odd.{suffix}", trust=True)
    assert evaluate(opened, batches).loss == pytest.approx(evaluate(models["odd"], batches).loss, rel=1e-5)
    assert sum(parameter.numel() for parameter in opened.parameters()) == 0
    opened.train()  # harmless
    assert opened.training


def test_inputs_by_place_and_by_name(files):
    folder, models = files
    opened, (image, vector) = OnnxModule(folder / "branches.onnx", threads=1), (images(3), torch.rand(3, 8))
    wanted = models["branches"](image, vector)["logits"]
    for got in (opened(image, vector), opened(image, vector=vector), opened(vector=vector, image=image)):
        assert torch.allclose(got["logits"], wanted, atol=1e-5)
    with pytest.raises(ModelError, match=r"takes image, vector, but was given 3×3×16×16 float32"):
        opened(image)
    with pytest.raises(ModelError, match=r"takes image, vector, but was given .*words"):
        opened(image, words=vector)
    with pytest.raises(ModelError, match=r"takes image, vector, but was given"):
        opened(image, vector, vector)


def test_files_of_others(tmp_path):
    """A file that says nothing of ours returns a tensor, or a tuple of them."""
    onnx = pytest.importorskip("onnx")

    class Two(nn.Module):
        def forward(self, x):
            return x + 1, x * 2

    export(Two(), tmp_path / "two.onnx", torch.ones(2, 3))
    proto = onnx.load(tmp_path / "two.onnx")
    del proto.metadata_props[:]
    onnx.save(proto, tmp_path / "two.onnx")
    more, twice = OnnxModule(tmp_path / "two.onnx")(torch.ones(1, 3))
    assert torch.equal(more, torch.full((1, 3), 2.0))
    assert torch.equal(twice, more)


def test_files_that_cannot_be_opened(tmp_path, monkeypatch):
    for suffix in ("onnx", "pt2"):
        with pytest.raises(FileFormatError, match=rf"there is no file .*none\.{suffix}"):
            open_exported(tmp_path / f"none.{suffix}", trust=True)
        (tmp_path / f"text.{suffix}").write_text("not a network")
        with pytest.raises(FileFormatError, match=rf"text\.{suffix}") as caught:
            open_exported(tmp_path / f"text.{suffix}", trust=True)
        assert "\n" not in str(caught.value)
    with pytest.raises(SpecError, match=r"\.onnx or \.pt2"):
        open_exported(tmp_path / "weights.safetensors")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"haloc\[onnx\]"):
        OnnxModule(tmp_path / "text.onnx")


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino", "eager"])
def test_files_are_timed_in_turns(files, brief, runtime):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    folder, _ = files
    suffix, seen = "pt2" if runtime == "eager" else "onnx", []
    named = {"one": folder / f"odd.{suffix}", "again": folder / f"odd.{suffix}"}
    target = Target.parse(f"cpu:{runtime}:b3:t1")
    found = time_files(named, images(), target, on_progress=lambda done, total: seen.append((done, total)))
    assert list(found) == ["one", "again"]
    assert all(estimate.value > 0 and estimate.error >= 0 for estimate in found.values())
    assert seen == [(number, 4) for number in (1, 2, 3, 4)]


def test_named_inputs_are_timed(files, brief):
    folder, _ = files
    inputs = {"vector": torch.ones(1, 8), "image": images(1)}
    found = time_files({"file": folder / "branches.onnx"}, inputs, Target.parse("cpu:onnxruntime:b2:t1"))
    assert found["file"].value > 0


def test_files_that_do_not_run_there(files, brief, tmp_path):
    folder, _ = files
    target = Target.parse("cpu:onnxruntime:b2:t1")
    with pytest.raises(SpecError, match=r"onnxruntime runs \.onnx files, got .*odd\.pt2"):
        time_files({"file": folder / "odd.pt2"}, images(), target)
    with pytest.raises(SpecError, match=r"eager runs \.pt2 files, got .*odd\.onnx"):
        time_files({"file": folder / "odd.onnx"}, images(), Target.parse("cpu"))
    with pytest.raises(FileFormatError, match="there is no file"):
        time_files({"file": tmp_path / "none.onnx"}, images(), target)
    with pytest.raises(CostError, match="file does not run on cpu:onnxruntime"):
        time_files({"file": folder / "odd.onnx"}, torch.ones(1, 3, 16), target)


class Returning(nn.Module):
    def __init__(self, *outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, x):
        return self.outputs


def compared(wanted, got, **options):
    return compare(Returning(*wanted), Returning(*got), [torch.zeros(1)], **options)


def test_how_far_outputs_are_apart():
    wanted = torch.tensor([[1.0, -4.0], [2.0, 0.0]])
    parity = compared([wanted], [wanted + torch.tensor([[0.002, 0.0], [0.0, 0.0]])])
    assert parity.max_abs == pytest.approx(0.002, rel=1e-3)
    assert parity.relative == pytest.approx(0.0005, rel=1e-3)
    assert parity.same_answer == 1
    turned = torch.tensor([[-4.0, 1.0], [2.0, 0.0]])
    loose = compared([wanted], [turned], strict=False)
    assert (loose.max_abs, loose.relative, loose.same_answer) == (5.0, 1.25, 0.5)
    with pytest.raises(ExportError, match=r"outputs differ by 5, 125\.0% of the largest"):
        compared([wanted], [turned])


def test_the_worst_output_counts():
    small, large = torch.full((1, 2), 1e-3), torch.full((1, 2), 1e3)
    with pytest.raises(ExportError, match=r"10\.0% of the largest"):
        compared([large, small], [large, small * 1.1])


def test_outputs_that_are_no_numbers():
    wanted = torch.tensor([[torch.nan, -torch.inf, 1.0]])
    assert compared([wanted], [wanted.clone()]).relative == 0
    for wrong in (torch.tensor([[torch.nan, 0.0, 1.0]]), torch.tensor([[torch.nan, -torch.inf, torch.nan]])):
        with pytest.raises(ExportError, match="does not compute what the model does"):
            compared([wanted], [wrong])
    classes = torch.arange(200)
    assert compared([classes], [classes.clone()]).same_answer == 1
    with pytest.raises(ExportError, match=r"1\.5% of the whole numbers"):
        compared([classes], [torch.where(classes < 3, 9, classes)])
    with pytest.raises(ExportError, match=r"shapes \[\(2,\)\], the model \[\(200,\)\]"):
        compared([classes], [classes[:2]])
    assert compared([torch.zeros(2, 3)], [torch.zeros(2, 3)]).relative == 0
    assert compared([torch.zeros(0, 3)], [torch.zeros(0, 3)]).same_answer == 1
