from __future__ import annotations

import errno
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from haloc.artifact import export as exporting
from haloc.artifact import formats
from haloc.artifact.export import export
from haloc.artifact.runtime import OnnxModule, open_exported
from haloc.errors import ExportError, FileFormatError, MissingExtraError, ModelError, SpecError
from haloc.factor.surgery import apply_plan
from haloc.zoo import create
from tests.artifact import networks
from tests.artifact.networks import ODD_PLAN, Answering, Branches, Deciding, Fixed, Odd, images, moved

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

BOTH = pytest.mark.parametrize("suffix", ["onnx", "pt2"])


def small_odd() -> nn.Module:
    return moved(apply_plan(Odd(), ODD_PLAN), images(4))


def graph(path: Path):
    return onnx.load(path).graph


@BOTH
def test_a_file_computes_what_the_network_does(tmp_path, suffix, capfd, caplog):
    small, path = small_odd().train(), tmp_path / f"small.{suffix}"
    before = {name: value.clone() for name, value in small.state_dict().items()}
    real = [(torch.rand(5, 3, 16, 16), torch.zeros(5)) for _ in range(2)]
    made = export(small, path, images(), samples=real)
    assert (made.path, made.format, made.bytes, made.dynamic_batch) == (path, suffix, path.stat().st_size, True)
    assert (made.inputs, made.outputs) == ({"image": ("batch", 3, 16, 16)}, {"output": ("batch", 10)})
    assert set(made.parity) == {"random", "real"}
    assert all(0 <= parity.relative < 1e-4 and parity.same_answer == 1 for parity in made.parity.values())
    assert json.loads(json.dumps(made.to_dict()))["path"] == str(path)
    assert small.training
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())
    opened = open_exported(path, trust=True)
    for batch in (1, 2, 7):
        wanted = small.eval()(images(batch))
        assert torch.allclose(opened(images(batch)), wanted, atol=1e-4)
    assert list(tmp_path.iterdir()) == [path]  # nothing beside it
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_an_onnx_file_is_as_lean_as_it_can_be(tmp_path):
    """It is what tables are measured with, convolutions, additions, activations; and it tells nothing of its origin."""
    model, path = create("resnet20", weights="pretrained"), tmp_path / "resnet20.onnx"
    made = export(model, path, images(1, 32))
    found = graph(path)
    kinds = [node.op_type for node in found.node]
    assert (kinds.count("Conv"), kinds.count("Relu"), kinds.count("Add")) == (19, 19, 9)
    assert not {"BatchNormalization", "Identity", "Constant"} & set(kinds)
    assert [dim.dim_param or dim.dim_value for dim in found.input[0].type.tensor_type.shape.dim] == ["batch", 3, 32, 32]
    assert found.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert made.bytes < 1.05 * sum(parameter.numel() * 4 for parameter in model.parameters())
    assert all(not value.external_data for value in found.initializer)
    assert str(Path(__file__).parents[2]).encode() not in path.read_bytes()


def test_a_program_holds_no_paths_and_no_example(tmp_path):
    path = tmp_path / "small.pt2"
    export(small_odd(), path, images())
    assert str(Path(__file__).parents[2]).encode() not in path.read_bytes()
    assert torch.export.load(path).example_inputs in (None, ((), {}))


def test_a_program_runs_without_haloc(tmp_path):
    small = small_odd()
    export(small, tmp_path / "small.pt2", images())
    torch.save(small(images(3)), tmp_path / "wanted.pt")
    script = f"""
import sys
sys.modules["haloc"] = None  # importing it fails
import torch
model = torch.export.load({str(tmp_path / "small.pt2")!r}).module()
x = torch.linspace(-1, 1, 3 * 3 * 16 * 16).reshape(3, 3, 16, 16)
wanted = torch.load({str(tmp_path / "wanted.pt")!r})
assert torch.allclose(model(x), wanted, atol=1e-5), (model(x) - wanted).abs().max()
assert not any(name.startswith("haloc.") for name in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@BOTH
@pytest.mark.parametrize("named", [False, True])
def test_several_inputs_and_outputs(tmp_path, suffix, named):
    model, path = (
        moved(apply_plan(Branches(), networks.BRANCHES_PLAN), images(4), torch.ones(4, 8)),
        tmp_path / f"s.{suffix}",
    )
    inputs = {"image": images(3), "scale": torch.rand(3, 10), "vector": torch.rand(3, 8)} if named else (
        images(3), torch.rand(3, 8)
    )  # fmt: skip
    made = export(model, path, inputs, samples=[inputs])
    assert list(made.inputs) == (["image", "scale", "vector"] if named else ["image", "vector"])
    assert made.outputs["maps_0"] == ("batch", 16, 16, 16)
    opened = open_exported(path, trust=True)
    got = opened(**inputs) if named else opened(*inputs)
    wanted = model(**inputs) if named else model(*inputs)
    assert torch.allclose(got["logits"], wanted["logits"], atol=1e-5)
    assert [part.shape for part in got["maps"]] == [part.shape for part in wanted["maps"]]


@BOTH
def test_a_dataclass_comes_back_as_a_dict(tmp_path, suffix):
    model, path = Answering(), tmp_path / f"answer.{suffix}"
    made = export(model, path, torch.randn(1, 6))
    assert (made.dynamic_batch, made.outputs) == (True, {"logits": ("batch", 5)})
    got = open_exported(path, trust=True)(torch.ones(3, 6))
    assert torch.allclose(got["logits"], model(torch.ones(3, 6)).logits, atol=1e-6)


def test_outputs_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.ViTForImageClassification(config).eval()
    made = export(model, tmp_path / "vit.onnx", {"pixel_values": images()})
    assert (list(made.inputs), made.outputs) == (["pixel_values"], {"logits": ("batch", 2)})
    got = OnnxModule(tmp_path / "vit.onnx")(pixel_values=images(3))
    assert torch.allclose(got["logits"], model(images(3)).logits, atol=1e-5)


@BOTH
def test_a_batch_that_is_fixed(tmp_path, suffix, caplog):
    path = tmp_path / f"fixed.{suffix}"
    made = export(Fixed(), path, torch.randn(4, 6), samples=torch.randn(9, 6))
    assert (made.dynamic_batch, made.inputs) == (False, {"x": (4, 6)})
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} takes batches of 4 only: the model fixes its batch"
    ]


def test_a_fixed_batch_serves_other_ones(tmp_path, caplog):
    model = Odd().eval()
    made = export(model, tmp_path / "two.onnx", images(2), dynamic_batch=False)
    assert made.inputs == {"image": (2, 3, 16, 16)}
    assert not caplog.records
    opened = OnnxModule(tmp_path / "two.onnx")
    assert opened.batch == 2
    for batch in (1, 2, 5):
        assert torch.allclose(opened(images(batch)), model(images(batch)), atol=1e-5)


def test_the_older_exporter_takes_over(tmp_path, caplog):
    """What torch.export cannot read is followed through one run, and that is said."""
    path = tmp_path / "deciding.onnx"
    made = export(Deciding(), path, torch.randn(2, 6))
    assert made.dynamic_batch
    assert torch.equal(OnnxModule(path)(torch.zeros(3, 6)), torch.ones(3, 6))
    (record,) = caplog.records
    assert "follows one run of the model" in record.getMessage()
    assert "\n" not in record.getMessage()
    with pytest.raises(ExportError, match=r"deciding\.pt2 was not written: the model cannot be exported: "):
        export(Deciding(), tmp_path / "deciding.pt2", torch.randn(2, 6))
    assert not (tmp_path / "deciding.pt2").exists()


@pytest.mark.parametrize("named", [False, True])
def test_the_older_exporter_by_itself(tmp_path, monkeypatch, named):
    def broken(*_: object) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(formats, "_translated", broken)
    model, path = Branches().eval(), tmp_path / "old.onnx"
    inputs = {"image": images(3), "vector": torch.rand(3, 8)}
    made = export(model, path, inputs if named else tuple(inputs.values()))
    assert made.dynamic_batch
    got = OnnxModule(path)(images(5), torch.ones(5, 8))
    assert torch.allclose(got["logits"], model(images(5), torch.ones(5, 8))["logits"], atol=1e-5)


@pytest.mark.parametrize("opset", [15, 18])
def test_operators_of_a_version(tmp_path, opset):
    export(Odd(), tmp_path / "odd.onnx", images(), opset=opset)
    assert {entry.version for entry in onnx.load(tmp_path / "odd.onnx").opset_import if not entry.domain} == {opset}


def test_half_precision(tmp_path):
    made = export(small_odd().half(), tmp_path / "half.onnx", images().half())
    assert made.parity["random"].relative < 2e-2
    assert OnnxModule(tmp_path / "half.onnx")(images().half()).dtype == torch.float16


def test_a_precision_that_the_runtime_lacks(tmp_path):
    with pytest.raises(ExportError, match=r"was not written: its runtime does not take the file written: .*bfloat16"):
        export(Odd().bfloat16(), tmp_path / "odd.onnx", images().bfloat16())
    made = export(Odd().bfloat16(), tmp_path / "odd.pt2", images().bfloat16())
    assert made.dynamic_batch


@BOTH
def test_an_unfaithful_file_is_not_written(tmp_path, suffix, monkeypatch):
    """Weights are off by a little in the file, and a good file that was there stays."""
    path = tmp_path / f"small.{suffix}"
    path.write_text("the old file")

    def shifted(model: nn.Module, *_: object) -> nn.Module:
        model.head.bias.data += 0.05
        return model

    monkeypatch.setattr(exporting, "fold_batchnorm", lambda model, inputs: shifted(Odd()))
    with pytest.raises(ExportError, match=r"was not written: the file written does not compute what the model does"):
        export(Odd(), path, images())
    assert path.read_text() == "the old file"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("suffix", "where"), [("onnx", "write_bytes"), ("pt2", "write_bytes"), ("pt2", "replace")])
def test_a_full_disk(tmp_path, suffix, where, monkeypatch):
    path = tmp_path / f"small.{suffix}"
    path.write_text("the old file")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, where, full)
    with pytest.raises(FileFormatError, match=r"^cannot write .*: No space left on device$"):
        export(nn.Linear(4, 2), path, torch.randn(2, 4))
    assert path.read_text() == "the old file"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_missing_is_said_first(tmp_path, monkeypatch):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, package, None)
            with pytest.raises(MissingExtraError, match=rf"'{package}'.*haloc\[onnx\]"):
                export(Odd(), tmp_path / "odd.onnx", images())
    assert not list(tmp_path.iterdir())


def test_mistakes(tmp_path):
    with pytest.raises(SpecError, match=r"as \.onnx or \.pt2, got 'small\.tflite'"):
        export(Odd(), "small.tflite", images())
    with pytest.raises(ModelError, match="does not run on the inputs given"):
        export(Odd(), tmp_path / "odd.onnx", torch.randn(1, 4, 16, 16))
    assert not list(tmp_path.iterdir())


def test_files_too_large_for_their_format(tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "MOST_BYTES", 1000)
    with pytest.raises(ExportError, match=r"an ONNX file holds less than 2; export a \.pt2 instead"):
        export(Odd(), tmp_path / "odd.onnx", images())


def test_logs_of_others_come_back(tmp_path, caplog):
    """Silence ends with the export."""
    export(nn.Linear(4, 2), tmp_path / "a.pt2", torch.randn(2, 4))
    with caplog.at_level(logging.WARNING):
        logging.getLogger("torch.onnx").warning("heard")
    assert "heard" in caplog.text


class Nested(nn.Module):
    """Takes a tensor and a dict, which the older exporter takes for named arguments where it comes last."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, extra):
        return self.fc(x + extra["a"] * extra["b"][0])


@pytest.mark.parametrize("opset", [None, 17])
def test_a_nest_of_inputs_is_no_set_of_named_arguments(tmp_path, opset):
    def inputs(batch=2):
        return torch.randn(batch, 8), {"a": torch.randn(batch, 8), "b": [torch.randn(batch, 8)]}

    model, path = Nested(), tmp_path / "nested.onnx"
    made = export(model, path, inputs(), samples=[inputs(3), inputs(1)], opset=opset)
    assert list(made.inputs) == ["x", "extra_a", "extra_b_0"]
    assert made.dynamic_batch
    x, extra = inputs(5)
    assert torch.allclose(open_exported(path)(x, extra), model(x, extra), atol=1e-5)
