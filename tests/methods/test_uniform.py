from __future__ import annotations

import pytest
import torch

from haloc.errors import BudgetError, SpecError
from haloc.factor.inspect import inspect
from haloc.factor.surgery import apply_plan
from haloc.forms import Dense, Spatial, Svd, Tucker2
from haloc.methods.uniform import uniform_plan
from haloc.zoo import create

IMAGE = torch.randn(1, 3, 32, 32)


@pytest.fixture(scope="module")
def layers():
    return inspect(create("resnet20"), IMAGE)


def test_half_ranks(layers):
    plan = uniform_plan(layers, fraction=0.5)
    assert plan["layer1.0.conv1"] == Tucker2(8, 8)
    assert plan["layer2.0.conv1"] == Tucker2(16, 8)
    assert plan["linear"] == Svd(5)
    assert layers.macs_of(plan) / layers.macs == pytest.approx(0.375, abs=0.005)


@pytest.mark.parametrize("macs", [0.2, 0.3, 0.47, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("forms", [("tucker2", "svd"), ("spatial",), ("tucker2-out",), ("tucker2-in",)])
def test_the_budget_is_met_and_used_up(layers, macs, forms):
    plan = uniform_plan(layers, macs=macs, forms=forms)
    remaining = layers.macs_of(plan) / layers.macs
    assert remaining <= macs
    assert remaining > macs - 0.06
    assert inspect(apply_plan(create("resnet20"), plan), IMAGE).macs == layers.macs_of(plan)


def test_skipped_layers_and_forms_not_asked_for_stay_dense(layers):
    plan = uniform_plan(layers, macs=0.5, forms=("spatial",), skip=("conv1",))
    assert plan["conv1"] == plan["linear"] == Dense()
    assert isinstance(plan["layer1.0.conv1"], Spatial)


def test_ranks_are_rounded(layers):
    plan = uniform_plan(layers, fraction=0.6, round_to=8)
    assert {form.rank_out % 8 for form in plan.values() if isinstance(form, Tucker2)} == {0}


def test_a_layer_that_would_not_gain_stays_dense(layers):
    assert set(uniform_plan(layers, fraction=0.99).values()) == {Dense()}


@pytest.mark.parametrize("wrong", [{}, {"macs": 0.5, "fraction": 0.5}, {"macs": 0}, {"macs": 1.1}, {"fraction": -1}])
def test_wrong_calls_are_refused(layers, wrong):
    with pytest.raises(SpecError, match="give either macs|must lie above 0"):
        uniform_plan(layers, **wrong)


def test_unknown_forms_and_layers_are_refused(layers):
    with pytest.raises(SpecError, match="Did you mean 'spatial'"):
        uniform_plan(layers, macs=0.5, forms=("spacial",))
    with pytest.raises(SpecError, match="no layer 'conv11'.*Did you mean 'conv1'"):
        uniform_plan(layers, macs=0.5, skip=("conv11",))
    with pytest.raises(SpecError, match="round_to"):
        uniform_plan(layers, macs=0.5, round_to=0)


def test_an_unreachable_budget_names_the_best_there_is(layers):
    with pytest.raises(BudgetError, match=r"1\.0% of the multiply-adds cannot be reached.*still leave [0-9.]+%"):
        uniform_plan(layers, macs=0.01, skip=("conv1",))
