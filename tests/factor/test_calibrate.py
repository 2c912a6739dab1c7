from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from haloc.errors import ModelError, PlanError
from haloc.factor import calibrate as module
from haloc.factor.calibrate import calibrate, patches
from tests.factor.layers import convs, deviation, make_input


@given(layer=convs())
@settings(max_examples=100, deadline=None)
def test_patches_are_what_the_layer_multiplies_with_its_weight(layer):
    inputs = make_input(layer)
    expected = layer(inputs)
    rows = patches(layer, inputs)
    weight = layer.weight.unflatten(0, (layer.groups, -1)).flatten(2)
    products = rows @ weight.mT
    outputs = products.unflatten(1, (len(inputs), -1)).permute(1, 0, 3, 2).reshape(expected.shape)
    if layer.bias is not None:
        outputs = outputs + layer.bias.reshape(-1, *[1] * (expected.dim() - 2))
    assert deviation(expected, outputs) < 1e-5


def test_moments_worked_out_by_hand():
    model = nn.Sequential(nn.Linear(2, 3))
    inputs = torch.tensor([[1.0, 0.0], [3.0, 2.0]])
    moments = calibrate(model, [(inputs, "labels")], ["0"])["0"]
    assert moments.mean.tolist() == [[2.0, 1.0]]
    assert moments.second.tolist() == [[[5.0, 3.0], [3.0, 2.0]]]
    assert moments.covariance().tolist() == [[[1.0, 1.0], [1.0, 1.0]]]
    assert moments.count == 2


def test_batches_and_chunks_make_no_difference(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3)).eval()
    images = torch.randn(12, 3, 8, 8)
    whole = calibrate(model, [images], ["0", "2"], positions=10**6)
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 5000)
    parts = calibrate(model, iter(images.split(5)), ["0", "2"], positions=10**6)
    for name in whole:
        assert torch.allclose(whole[name].second, parts[name].second, atol=1e-6)
        assert torch.allclose(whole[name].mean, parts[name].mean, atol=1e-6)
        assert whole[name].count == parts[name].count


def test_a_sample_of_places_comes_near_and_is_always_the_same():
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1))
    batches = list(torch.randn(64, 3, 16, 16).split(16))
    everything, once, again = (
        calibrate(model, batches, ["0"], positions=positions)["0"] for positions in (10**6, 32, 32)
    )
    assert torch.equal(once.second, again.second)
    assert once.count == 64 * 32
    assert float((once.second - everything.second).norm() / everything.second.norm()) < 0.2


def test_low_precision_elsewhere_does_not_reach_the_moments():
    model, images = nn.Sequential(nn.Linear(64, 4)), torch.randn(500, 64)
    exact = images.double().mT @ images.double() / 500
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            moments = calibrate(model, [images], ["0"])["0"]
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.allclose(moments.second[0], exact, atol=1e-5)


def test_layers_inside_dicts_tuples_and_tokens_are_seen():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, y):
            return self.fc(x).sum() + self.fc(y).sum()

    batches = [{"x": torch.randn(2, 7, 4), "y": torch.randn(3, 4), "labels": 1}]
    assert calibrate(Model(), batches, ["fc"])["fc"].count == 2 * 7 + 3


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()).train()
    model[2].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calibrate(model, [torch.randn(2, 3, 8, 8)], ["0"])
    assert [m.training for m in model.modules()] == [True, True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model[0]._forward_pre_hooks


def test_bad_calls_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(PlanError, match="no layer '3'"):
        calibrate(model, [], ["3"])
    with pytest.raises(ModelError, match="'1' is a ReLU"):
        calibrate(model, [], ["1"])
    with pytest.raises(ModelError, match="not called on any calibration batch"):
        calibrate(model, [], ["0"])
    with pytest.raises(ModelError, match="NaN or infinite"):
        calibrate(model, [torch.full((1, 2), torch.inf)], ["0"])
    with pytest.raises(ModelError, match=r"does not run on the inputs given \(1×5 float32\)"):
        calibrate(model, [torch.zeros(1, 5)], ["0"])
    assert not model[0]._forward_pre_hooks
