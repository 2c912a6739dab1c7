from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import haloc
from haloc.cost.deploy import Networks, at_batch, export_onnx, fold_batchnorm, sketch
from haloc.cost.sampling import Schedule, visit
from haloc.cost.target import Target
from haloc.errors import PlanError
from haloc.forms import Svd, Tucker2

BRIEF = Schedule(1, 1, 0.0, 0.001, 2)


def norms(model):
    return sum(isinstance(module, _BatchNorm) for module in model.modules())


def trained(model):
    """A model whose BatchNorms have something to fold."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            for tensor in (module.running_mean, module.bias, module.weight, module.running_var):
                if tensor is not None:
                    tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model.eval()


@pytest.mark.parametrize("name", ["resnet20", "vgg16_bn_cifar", "mobilenet_v2"])
def test_folding_changes_nothing_but_the_batchnorms(name):
    model = trained(haloc.create(name))
    x = torch.randn(2, 3, 32, 32)
    before = norms(model)
    folded = fold_batchnorm(model, x)
    assert before > 0
    assert norms(model) == before
    assert norms(folded) == 0
    with torch.no_grad():
        torch.testing.assert_close(folded(x), model(x), rtol=1e-3, atol=1e-3)


def test_a_factorised_network_folds_too():
    model = trained(haloc.create("resnet20"))
    small = haloc.apply_plan(model, {"layer1.0.conv1": Tucker2(8, 8)})
    assert norms(fold_batchnorm(small, torch.randn(2, 3, 32, 32))) == 0


class Forked(nn.Module):
    """Uses the convolution's output a second time, so that its BatchNorm cannot go into it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.conv(x)
        return {"out": [self.norm(x), x]}


def test_what_cannot_be_folded_is_left():
    model = trained(Forked())
    assert norms(fold_batchnorm(model, torch.randn(2, 3, 8, 8))) == 1


def test_a_layer_called_twice_is_left():
    conv = nn.Conv2d(3, 3, 3, padding=1)
    model = trained(nn.Sequential(conv, nn.BatchNorm2d(3), conv))
    assert norms(fold_batchnorm(model, torch.randn(2, 3, 8, 8))) == 1


def test_layers_that_are_linear_or_without_affine():
    model = trained(nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5, affine=False)))
    x = torch.randn(6, 4)
    folded = fold_batchnorm(model, x)
    assert norms(folded) == 0
    torch.testing.assert_close(folded(x), model(x))


def test_a_sketch_has_the_layers_of_the_plan():
    model = haloc.create("resnet20")
    plan = haloc.Plan({"layer1.0.conv1": Tucker2(8, 8), "linear": Svd(5)})
    x = torch.randn(2, 3, 32, 32)
    drawn, real = sketch(model, plan), haloc.apply_plan(model, plan)
    assert [p.shape for p in drawn.parameters()] == [p.shape for p in real.parameters()]
    assert drawn(x).isfinite().all()
    assert model.layer1[0].conv1.weight.shape == (16, 16, 3, 3)
    with pytest.raises(PlanError, match="the model has no layer 'nonsense'"):
        sketch(model, {"nonsense": Svd(2)})


def test_the_onnx_file_computes_the_same(tmp_path):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    model, x = haloc.create("resnet20").eval(), torch.randn(2, 3, 32, 32)
    names = export_onnx(model, x, tmp_path / "network.onnx")
    session = runtime.InferenceSession(str(tmp_path / "network.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, dict(zip(names, [x.numpy()], strict=True)))
    np.testing.assert_allclose(found, model(x).detach().numpy(), atol=1e-4)


class Named(nn.Module):
    def forward(self, left, right):
        return left @ right


@pytest.mark.parametrize("spec", ["cpu", "cpu:onnxruntime", "cpu:openvino"])
@pytest.mark.parametrize("inputs", [(torch.eye(2), torch.eye(2)), {"left": torch.eye(2), "right": torch.eye(2)}])
def test_networks_with_several_inputs_run(spec, inputs, tmp_path):
    target = Target.parse(spec + ":b2")
    if target.runtime != "eager":
        pytest.importorskip(target.runtime)
    runner = Networks(lambda _: Named(), inputs, target, tmp_path).open("it")
    assert all(sample > 0 for sample in visit(runner, BRIEF))
    runner.close()


def test_examples_are_repeated_or_cut_to_the_batch():
    assert at_batch(torch.zeros(3, 5), 8).shape == (8, 5)
    assert at_batch({"x": [torch.zeros(3, 5), 7]}, 2) == {"x": [pytest.approx(torch.zeros(2, 5)), 7]}


def test_nests_of_inputs_are_timed_as_onnx_files(tmp_path):
    pytest.importorskip("onnx")

    class Nested(nn.Module):
        def forward(self, x, extra, scale=1.0):
            return x + extra["a"] * scale

    x, extra = torch.ones(1, 4), {"a": torch.ones(1, 4)}
    assert export_onnx(Nested(), (x, extra), tmp_path / "positional.onnx") == ["input_0", "input_1"]
    assert export_onnx(Nested(), {"x": x, "extra": extra}, tmp_path / "named.onnx") == ["x", "extra_0"]
