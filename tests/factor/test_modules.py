from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from haloc.errors import ModelError, PlanError
from haloc.factor.calibrate import InputMoments, calibrate
from haloc.factor.layers import layer_shape
from haloc.factor.modules import Factoriser, merge
from haloc.forms import Dense, Spatial, Svd, Tucker2, families, full_form, full_ranks, params, scaled_form, stages
from tests.factor.layers import GRID, convs, deviation, lower_rank, make_conv, make_input


def described(shape) -> tuple:
    steps = (shape.kernel, shape.stride, shape.dilation)
    return (shape.in_channels, shape.out_channels, shape.groups, shape.bias, shape.padding_mode, *steps)


def moments_of(layer: nn.Module, inputs: torch.Tensor) -> InputMoments:
    return calibrate(nn.Sequential(layer), [inputs], ["0"], positions=10**6)["0"]


# With activations every seventh case will do: any two values of two options still meet.
@pytest.mark.parametrize(("aware", "step"), [(False, 1), (True, 7)])
def test_full_rank_reproduces_the_layer_over_the_whole_grid(aware, step):
    worst = 0.0
    for case in GRID[::step]:
        layer = make_conv(**case)
        inputs = make_input(layer)
        factoriser = Factoriser(layer, moments_of(layer, inputs) if aware else None)
        for family in families(layer_shape(layer)):
            built = factoriser.build(full_form(layer_shape(layer), family))
            worst = max(worst, deviation(layer(inputs), built(inputs)))
    assert len(GRID) > 600
    assert worst < 1e-5


@given(layer=convs(), aware=st.booleans())
@settings(max_examples=150, deadline=None)
def test_full_rank_reproduces_any_convolution(layer, aware):
    inputs = make_input(layer)
    expected = layer(inputs)
    factoriser = Factoriser(layer, moments_of(layer, inputs) if aware else None)
    for family in families(layer_shape(layer)):
        built = factoriser.build(full_form(layer_shape(layer), family))
        assert deviation(expected, built(inputs)) < 1e-5


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_tucker2_reproduces_a_weight_that_has_its_ranks(aware, groups, mode):
    layer = lower_rank(make_conv((3, 3), 2, 1, 1, groups, True, 16, 20, mode), rank_out=4, rank_in=3)
    inputs = torch.randn(4, 16, 9, 8)
    full_out, full_in = full_ranks(layer_shape(layer), "tucker2")
    factoriser = Factoriser(layer, moments_of(layer, inputs) if aware else None)
    for form in (Tucker2(4, 3), Tucker2(5, 3), Tucker2(full_out, 3), Tucker2(4, full_in)):
        assert deviation(layer(inputs), factoriser.build(form)(inputs)) < 1e-5


@given(bias=st.booleans(), sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)), aware=st.booleans())
@settings(max_examples=30, deadline=None)
def test_full_rank_reproduces_any_linear_layer(bias, sizes, aware):
    layer = nn.Linear(*sizes, bias=bias)
    inputs = torch.randn(4, 5, sizes[0])
    built = Factoriser(layer, moments_of(layer, inputs) if aware else None).build(Svd(min(sizes)))
    assert deviation(layer(inputs), built(inputs)) < 1e-5


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("family", ["tucker2", "spatial", "svd"])
@pytest.mark.parametrize("groups", [1, 2])
def test_error_falls_as_rank_grows(aware, family, groups):
    layer = make_conv((1, 1) if family == "svd" else (3, 3), groups=groups, c=12, f=16)
    factoriser = Factoriser(layer, moments_of(layer, torch.randn(8, 12, 9, 9)) if aware else None)
    forms = [scaled_form(layer_shape(layer), family, part / 10) for part in range(1, 11)]
    errors = [factoriser.error(form) for form in dict.fromkeys(forms)]
    assert all(later < earlier for earlier, later in pairwise(errors))
    assert errors[0] > 0.1
    assert errors[-1] < 1e-6


@given(layer=convs(), part=st.floats(0.1, 1.0))
@settings(max_examples=60, deadline=None)
def test_built_modules_are_what_the_shapes_say(layer, part):
    shape = layer_shape(layer)
    for family in families(shape):
        form = scaled_form(shape, family, part)
        built = Factoriser(layer).build(form)
        layers = list(built) if isinstance(built, nn.Sequential) else [built]
        assert [described(layer_shape(stage)) for stage in layers] == [described(s) for s in stages(shape, form)]
        assert sum(p.numel() for p in built.parameters()) == params(shape, form)


@pytest.mark.parametrize("aware", [False, True])
def test_activation_aware_factors_have_the_smaller_output_error(aware):
    torch.manual_seed(1)
    mixing = torch.randn(12, 12) * torch.logspace(0, -2, 12)
    inputs = torch.einsum("cd,bdhw->bchw", mixing, torch.randn(16, 12, 8, 8))
    layer = make_conv((3, 3), padding=1, c=12, f=16, bias=aware)
    moments = moments_of(layer, inputs)
    for form in (Tucker2(8, 6), Tucker2(16, 4), Tucker2(6, 12), Spatial(10)):
        plain, better = Factoriser(layer).build(form), Factoriser(layer, moments).build(form)
        errors = [(layer(inputs) - built(inputs)).norm() for built in (plain, better)]
        assert errors[1] < 0.8 * errors[0]


def test_hidden_channels_are_balanced():
    built = Factoriser(make_conv((3, 3), c=12, f=16)).build(Tucker2(6, 5))
    first, core, last = (layer.weight.detach() for layer in built)
    assert torch.allclose(first.flatten(1).norm(dim=1), core.transpose(0, 1).flatten(1).norm(dim=1), rtol=1e-3)
    assert torch.allclose(core.flatten(1).norm(dim=1), last.flatten(1).norm(dim=0), rtol=1e-3)
    first, last = (layer.weight.detach() for layer in Factoriser(nn.Linear(12, 9)).build(Svd(4)))
    assert torch.allclose(first.norm(dim=1), last.norm(dim=0), rtol=1e-5)


def test_dead_channels_stay_finite():
    layer = make_conv((3, 3), c=6, f=8)
    layer.weight.data[2:] = 0
    moments = moments_of(layer, torch.zeros(1, 6, 8, 8))
    for form in (Tucker2(5, 4), Spatial(9), Tucker2(5, 6)):
        for known in (None, moments):
            built = Factoriser(layer, known).build(form)
            assert all(bool(p.isfinite().all()) for p in built.parameters())
    layer.weight.data.zero_()
    assert all(bool(p.isfinite().all()) for p in Factoriser(layer).build(Tucker2(5, 4)).parameters())


@given(layer=convs(), part=st.floats(0.2, 1.0))
@settings(max_examples=60, deadline=None)
def test_merging_gives_the_same_outputs_in_one_layer(layer, part):
    inputs = make_input(layer)
    for family in families(layer_shape(layer)):
        built = Factoriser(layer).build(scaled_form(layer_shape(layer), family, part))
        if isinstance(built, nn.Sequential):
            merged = merge(built)
            assert layer_shape(merged) == layer_shape(layer)
            assert deviation(built(inputs), merged(inputs)) < 1e-5


def test_merging_refuses_what_is_no_chain_of_factors():
    with pytest.raises(ModelError, match="a ReLU, expected"):
        merge(nn.Sequential(nn.Conv2d(2, 2, 1, bias=False), nn.ReLU()))
    with pytest.raises(ModelError, match="bias between the factors"):
        merge(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 3, padding=1)))
    with pytest.raises(ModelError, match="mixed"):
        merge(nn.Sequential(nn.Conv2d(2, 2, 1, bias=False), nn.Linear(2, 2)))


def test_the_chain_answers_for_the_layer():
    layer = make_conv((3, 3), 2, "valid", 1, 2, True, 12, 16)
    built = Factoriser(layer).build(Tucker2(4, 3))
    for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"):
        assert getattr(built, name) == getattr(layer, name)
    assert Factoriser(nn.Linear(8, 4)).build(Svd(2)).out_features == 4


def test_dense_is_a_fresh_copy():
    layer = make_conv((3, 3))
    built = Factoriser(layer).build(Dense())
    assert built is not layer
    assert torch.equal(built.weight, layer.weight)


def test_what_cannot_be_decomposed_is_refused():
    layer = make_conv((3, 3))
    with pytest.raises(PlanError, match="rank_out 9 is outside"):
        Factoriser(layer).build(Tucker2(9, 2))
    with pytest.raises(ModelError, match="another layer"):
        Factoriser(layer, moments_of(nn.Linear(5, 5), torch.randn(3, 5)))
    layer.weight.data[0] = float("nan")
    with pytest.raises(ModelError, match="NaN"):
        Factoriser(layer)


@given(layer=convs(), aware=st.booleans())
@settings(max_examples=60, deadline=None)
def test_ordered_factors_have_the_same_product(layer, aware):
    inputs = make_input(layer)
    factoriser = Factoriser(layer, moments_of(layer, inputs) if aware else None)
    for family in families(layer_shape(layer)):
        form = scaled_form(layer_shape(layer), family, 0.6)
        plain, nested = factoriser.build(form), factoriser.build(form, nested=True)
        assert deviation(plain(inputs), nested(inputs)) < 1e-4


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize(("form", "needed"), [(Tucker2(10, 9), 3), (Tucker2(20, 9), 3), (Tucker2(10, 16), 4)])
def test_ordered_factors_put_what_matters_first(form, needed, aware):
    """A weight of ranks 4 and 3: cut after as many channels, ordered factors of higher ranks are exact still."""
    layer = lower_rank(make_conv((3, 3), 1, 1, 1, 1, True, 16, 20), rank_out=4, rank_in=3)
    inputs = torch.randn(8, 16, 9, 8)
    nested = Factoriser(layer, moments_of(layer, inputs) if aware else None).build(form, nested=True)
    nested[0].weight.data[needed:] = 0
    assert deviation(layer(inputs), nested(inputs)) < 1e-4
