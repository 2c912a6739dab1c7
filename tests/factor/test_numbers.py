"""Weights and inputs that are huge, tiny, zero or not there: the same answer at every scale, or a refusal by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import haloc
from haloc.errors import ModelError
from haloc.factor.calibrate import calibrate
from haloc.factor.modules import Factoriser
from haloc.forms import Spatial, Svd, Tucker2
from tests.factor.layers import deviation

SCALES = [1e30, 1e-30, 1e-36]
FORMS = [Tucker2(3, 3), Tucker2(8, 3), Tucker2(3, 8), Spatial(4)]


def conv(scale: float = 1.0, **options) -> nn.Conv2d:
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 8, 3, bias=False, **options)
    layer.weight.data = layer.weight.data * scale
    return layer


def images(scale: float = 1.0) -> torch.Tensor:
    return torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(1)).cumsum(3) * scale


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_factors_are_as_good_at_every_scale(form, scale):
    usual, other = Factoriser(conv()), Factoriser(conv(scale))
    assert other.error(form) == pytest.approx(usual.error(form), rel=1e-3)
    x = images()
    wanted, got = (factoriser.build(form)(x).detach() for factoriser in (usual, other))
    assert deviation(wanted, got / scale) < 2e-3


@pytest.mark.parametrize("scale", SCALES)
def test_factors_of_huge_and_tiny_weights_are_balanced(scale):
    norms = [float(layer.weight.detach().double().norm()) for layer in Factoriser(conv(scale)).build(Spatial(4))]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize("weight_scale", [1.0, *SCALES])
@pytest.mark.parametrize("input_scale", [1.0, 1e25, 1e-25])
@pytest.mark.parametrize("bias", [False, True])
def test_activation_aware_factors_are_as_good_at_every_scale(weight_scale, input_scale, bias):
    def error(weight_scale, input_scale):
        layer, x = conv(weight_scale, padding=1), images(input_scale)
        layer.bias = nn.Parameter(torch.zeros(8)) if bias else None
        moments = calibrate(nn.Sequential(layer), [x], ["0"])["0"]
        return Factoriser(layer, moments).error(Tucker2(3, 3))

    assert error(weight_scale, input_scale) == pytest.approx(error(1.0, 1.0), rel=1e-3)


def test_the_shift_of_the_bias_is_at_the_scale_of_the_weight():
    for scale in (1.0, 1e30):
        layer, x = conv(scale), images() + 3
        layer.bias = nn.Parameter(torch.zeros(8))
        chain = Factoriser(layer, calibrate(nn.Sequential(layer), [x], ["0"])["0"]).build(Tucker2(2, 2))
        means = [module(x).detach().mean((0, 2, 3)) / scale for module in (layer, chain)]
        assert deviation(*means) < 1e-3


def test_a_layer_of_zeros_loses_nothing():
    layer = nn.Linear(16, 16)
    layer.weight.data.zero_()
    moments = calibrate(nn.Sequential(layer), [torch.randn(4, 16)], ["0"])["0"]
    for known in (None, moments):
        factoriser = Factoriser(layer, known)
        assert factoriser.error(Svd(2)) == 0
        assert torch.equal(factoriser.build(Svd(2))(torch.ones(1, 16)), layer(torch.ones(1, 16)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_refused_by_the_layers_name(value):
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    x[0, 0] = value
    with pytest.raises(ModelError, match="layer '1' saw NaN or infinite inputs"):
        calibrate(model, [x], ["1"])


def test_calibration_on_nothing_is_refused():
    with pytest.raises(ModelError, match="layer '0' was not called on any calibration batch"):
        calibrate(nn.Sequential(nn.Linear(4, 4)), [torch.ones(0, 4)], ["0"])


def test_models_without_values_are_counted_and_not_factorised(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16))
        assert haloc.inspect(model, torch.ones(1, 16)).macs == 256
    with pytest.raises(ModelError, match="layer '0': its weight is on the meta device"):
        haloc.apply_plan(model, {"0": Svd(4)})
    haloc.save(tmp_path, haloc.apply_plan(nn.Sequential(nn.Linear(16, 16)), {"0": Svd(4)}))
    with pytest.raises(haloc.HalocError, match="of the model is on the meta device"):
        haloc.load(tmp_path, model)
