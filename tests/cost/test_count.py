from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from haloc.cost.count import COUNTS, Count
from haloc.cost.model import Estimate, layers_cost
from haloc.errors import SpecError
from haloc.factor.inspect import inspect
from haloc.factor.modules import Factoriser
from haloc.forms import Dense, Spatial, Svd, Tucker2, families, scaled_form
from haloc.shapes import LinearShape
from tests.factor.layers import convs, make_input
from tests.test_shapes import conv

HALF = Tucker2(rank_out=32, rank_in=16)
IN, OUT = 56 * 56, 28 * 28


def price(quantity, shape, form, **setting):
    return Count(quantity, **setting).price(shape, form).value


def test_a_convolution_worked_out_by_hand():
    assert price("macs", conv(), Dense()) == 64 * 128 * 9 * OUT
    assert price("params", conv(bias=True), Dense()) == 64 * 128 * 9 + 128
    assert price("activations", conv(), Dense()) == 4 * 128 * OUT
    assert price("bytes", conv(), Dense()) == 4 * (64 * IN + 128 * OUT + 64 * 128 * 9)


def test_a_factorised_convolution_worked_out_by_hand():
    """64 → 16 channels at the input's size, 16 → 32 with stride 2, 32 → 128."""
    weights = 64 * 16 + 16 * 32 * 9 + 32 * 128
    written = 16 * IN + 32 * OUT + 128 * OUT
    read = 64 * IN + 16 * IN + 32 * OUT
    assert price("macs", conv(), HALF) == 64 * 16 * IN + (16 * 32 * 9 + 32 * 128) * OUT
    assert price("params", conv(), HALF) == weights
    assert price("activations", conv(), HALF) == 4 * written
    assert price("bytes", conv(), HALF) == 4 * (weights + read + written)


def test_batch_and_precision():
    setting = {"batch_size": 8, "element_bytes": 2}
    linear = LinearShape(512, 1000, positions=3)
    assert price("macs", linear, Svd(10), **setting) == 8 * 3 * 10 * (512 + 1000)
    assert price("params", linear, Svd(10), **setting) == 10 * 512 + 10 * 1000 + 1000
    assert price("activations", linear, Svd(10), **setting) == 2 * 8 * 3 * (10 + 1000)
    assert price("bytes", linear, Svd(10), **setting) == 2 * (8 * 3 * (512 + 2 * 10 + 1000) + 10 * 512 + 11 * 1000)
    assert price("activations", conv(images=5), Dense()) == 5 * price("activations", conv(), Dense())


def counted_by_running(module: nn.Module, inputs: torch.Tensor) -> dict[str, int]:
    """What the plain layers of a module really read, write and hold."""
    seen = {"params": sum(p.numel() for p in module.parameters()), "read": 0, "written": 0}

    def hook(layer, args, output):
        seen["read"] += args[0].numel()
        seen["written"] += output.numel()

    for layer in module.modules():
        if not list(layer.children()):
            layer.register_forward_hook(hook)
    module(inputs)
    return seen


@settings(max_examples=40, deadline=None)
@given(convs())
def test_counts_are_those_of_the_layers_built(layer):
    check_against_run(layer, make_input(layer, batch=3))


def test_counts_are_those_of_linear_layers_built():
    check_against_run(nn.Linear(20, 12), torch.randn(3, 5, 20))


def check_against_run(layer, inputs):
    shape = inspect(layer, inputs).layers[0].shape
    factoriser = Factoriser(layer)
    for form in (Dense(), *(scaled_form(shape, family, 0.5) for family in families(shape))):
        with torch.no_grad():
            seen = counted_by_running(factoriser.build(form), inputs)
        setting = {"batch_size": 3, "element_bytes": 2}
        assert price("params", shape, form, **setting) == seen["params"]
        assert price("activations", shape, form, **setting) == 2 * seen["written"]
        assert price("bytes", shape, form, **setting) == 2 * (seen["read"] + seen["written"] + seen["params"])


def test_sums_over_a_network_are_those_of_the_inventory():
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(32 * 36, 10))
    layers = inspect(model, torch.randn(2, 16, 8, 8))
    plan = {"0": Tucker2(8, 8), "1": Spatial(8), "3": Svd(4)}
    assert layers_cost(layers, plan, Count("macs")) == Estimate(layers.macs_of(plan))
    assert layers_cost(layers, plan, Count("params")) == Estimate(layers.params_of(plan))


def test_units():
    assert {quantity: Count(quantity).unit for quantity in COUNTS} == {
        "macs": "", "params": "", "activations": "B", "bytes": "B",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"quantity": "mac"}, "'mac' cannot be counted, expected one of macs, .* Did you mean 'macs'"),
        ({"quantity": "macs", "batch_size": 0}, "batch_size must be a whole number above 0, got 0"),
        ({"quantity": "macs", "element_bytes": 0.5}, "element_bytes must be a whole number above 0, got 0.5"),
    ],
)
def test_what_cannot_be_counted_is_refused(setting, text):
    with pytest.raises(SpecError, match=text):
        Count(**setting)
