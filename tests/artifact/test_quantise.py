from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

import pytest
import torch

from haloc.artifact.export import export
from haloc.artifact.quantise import quantise
from haloc.artifact.runtime import OnnxModule
from haloc.errors import DataError, ExportError, FileFormatError, MissingExtraError, SpecError
from haloc.factor.surgery import apply_plan
from haloc.training.evaluate import evaluate
from haloc.zoo import DIGITS, load_data
from tests.artifact.networks import BRANCHES_PLAN, Branches, Odd, images, moved

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    path = tmp_path_factory.mktemp("odd") / "odd.onnx"
    torch.manual_seed(0)
    export(Odd().eval(), path, images())
    return path


def test_eight_bits_and_nearly_the_same_answers(tmp_path, capfd):
    from torch import nn

    from haloc.training.baseline import train
    from haloc.training.settings import TrainSettings

    digits = load_data("digits")
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32),
        nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    batches = digits.train.batches(64, normalisation=DIGITS, shuffle=True)
    train(model, batches, settings=TrainSettings(epochs=4, lr=0.1, warmup_epochs=1))
    export(model, tmp_path / "digits.onnx", next(iter(batches))[0])
    made = quantise(tmp_path / "digits.onnx", tmp_path / "digits.int8.onnx", batches, limit=200)
    assert 200 <= made.samples < 264
    assert made.bytes < 0.6 * made.source_bytes
    assert json.loads(json.dumps(made.to_dict()))["method"] == "minmax"
    test = digits.test.batches(100, normalisation=DIGITS)
    exact, eight = (evaluate(OnnxModule(tmp_path / name), test).top1 for name in ("digits.onnx", "digits.int8.onnx"))
    assert exact > 0.8
    assert abs(exact - eight) <= 0.01
    assert made.parity.same_answer > 0.97
    graph = onnx.load(tmp_path / "digits.int8.onnx").graph
    weights = [
        value for value in graph.initializer if value.data_type == onnx.TensorProto.INT8 and len(value.dims) == 4
    ]
    assert len(weights) == 2
    scales = {value.name: value.dims for value in graph.initializer if "weight_scale" in value.name}
    assert [16] in scales.values() or (16,) in map(tuple, scales.values())  # one for each channel
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.int8.onnx", "digits.onnx"]
    assert "histogram" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("method", ["entropy", "percentile"])
def test_other_ways_to_find_ranges(odd, tmp_path, method, capfd):
    made = quantise(odd, tmp_path / "q.onnx", [torch.rand(4, 3, 16, 16)], method=method, reduce_range=True)
    assert (made.method, made.reduce_range, made.samples) == (method, True, 4)
    assert capfd.readouterr() == ("", "")


def test_several_inputs_and_batches_that_are_fixed(tmp_path):
    small = moved(apply_plan(Branches(), BRANCHES_PLAN), images(4), torch.ones(4, 8))
    inputs = {"image": images(3), "vector": torch.ones(3, 8)}
    export(small, tmp_path / "b.onnx", inputs, dynamic_batch=False)
    for samples in ([inputs | {"labels": torch.ones(3)}], [tuple(inputs.values())], inputs):
        made = quantise(tmp_path / "b.onnx", tmp_path / "q.onnx", samples)
        assert made.samples == 3
    got = OnnxModule(tmp_path / "q.onnx")(**inputs)
    assert got["logits"].shape == (3, 10)


def test_mistakes_and_broken_files(odd, tmp_path, monkeypatch):
    sample = [torch.rand(2, 3, 16, 16)]
    with pytest.raises(SpecError, match=r"there is no method 'minmix'.* Did you mean 'minmax'"):
        quantise(odd, tmp_path / "q.onnx", sample, method="minmix")
    with pytest.raises(SpecError, match="ONNX files are quantised to ONNX files"):
        quantise(odd, tmp_path / "q.pt2", sample)
    with pytest.raises(FileFormatError, match="there is no file"):
        quantise(tmp_path / "none.onnx", tmp_path / "q.onnx", sample)
    with pytest.raises(DataError, match="the samples are empty"):
        quantise(odd, tmp_path / "q.onnx", [])
    quantisation = pytest.importorskip("onnxruntime.quantization")
    with monkeypatch.context() as broken:
        broken.setattr(quantisation, "quantize_static", None)
        with pytest.raises(ExportError, match="cannot be quantised: TypeError"):
            quantise(odd, tmp_path / "q.onnx", sample)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "onnx", None)
        with pytest.raises(MissingExtraError, match=r"haloc\[onnx\]"):
            quantise(odd, tmp_path / "q.onnx", sample)
    assert not list(tmp_path.iterdir())


def test_a_full_disk(odd, tmp_path, monkeypatch):
    (tmp_path / "q.onnx").write_text("the old file")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(FileFormatError, match=r"^cannot write .*q\.onnx: No space left on device$"):
        quantise(odd, tmp_path / "q.onnx", [torch.rand(2, 3, 16, 16)])
    assert (tmp_path / "q.onnx").read_text() == "the old file"
