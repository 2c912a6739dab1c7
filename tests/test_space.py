from __future__ import annotations

from math import prod

import pytest
import torch

from haloc.errors import SpecError
from haloc.factor.inspect import inspect
from haloc.forms import Spatial, Tucker2
from haloc.space import LayerSpace, paper_step, rank_space
from haloc.zoo import create
from tests.test_shapes import conv


@pytest.fixture(scope="module")
def resnet18():
    return inspect(create("resnet18"), torch.randn(1, 3, 64, 64))


@pytest.fixture(scope="module")
def threes(resnet18):
    return [layer.name for layer in resnet18 if layer.kind == "Conv2d" and layer.shape.kernel == (3, 3)]


def test_resnet18_has_the_papers_number_of_rank_settings(resnet18, threes):
    """The paper, Question 1: 2.2e71 combinations for the sixteen 3×3 layers."""
    space = rank_space(resnet18, round_to=1, equal=False, names=threes)
    assert len(space.layers) == 16
    assert space.size == 2**237
    assert f"{space.size:.1e}" == "2.2e+71"


def test_the_design_principles_bring_it_near_the_papers_other_number(resnet18, threes):
    """The paper, Question 1: 7.8e13 after Design Principles 1 and 2."""
    space = rank_space(resnet18, names=threes)
    assert space.size == 4**5 * 8**8 * 16**3 == 2**46
    assert 0.85 < space.size / 7.8e13 < 1.15


def test_settings_are_counted_as_they_are_listed(resnet18):
    for equal in (True, False):
        space = rank_space(resnet18, equal=equal)
        listed = {name: list(layer) for name, layer in space.layers.items()}
        assert all(len(forms) == len(set(forms)) == len(space.layers[name]) for name, forms in listed.items())
        assert prod(map(len, listed.values())) == space.size


def test_forms_listed():
    assert list(LayerSpace("tucker2", ((4, 8), (4, 8)), True)) == [Tucker2(4, 4), Tucker2(8, 8)]
    assert len(list(LayerSpace("tucker2", ((4, 8, 12), (4, 8)), False))) == 6
    assert list(LayerSpace("spatial", ((4, 8),), True)) == [Spatial(4), Spatial(8)]


@pytest.mark.parametrize(
    ("channels", "step"), [(8, 4), (16, 4), (31, 4), (32, 8), (64, 16), (100, 16), (128, 16), (256, 32), (2048, 32)]
)
def test_steps_follow_the_papers_list_by_powers_of_two(channels, step):
    assert paper_step(conv(in_channels=channels, out_channels=2048), "tucker2", widest=512) == step
    assert paper_step(conv(in_channels=channels, out_channels=64), "tucker2", widest=64) == 4


def test_narrow_layers_still_have_a_setting(resnet18):
    assert list(rank_space(resnet18, round_to=32).layers["conv1"]) == [Tucker2(3, 3)]
    space = rank_space(resnet18, round_to=32, equal=False)
    assert {form.rank_in for form in space.layers["conv1"]} == {3}


@pytest.mark.parametrize("step", [0, -4, "auto", 1.5])
def test_steps_that_are_none_are_refused(resnet18, step):
    with pytest.raises(SpecError, match="round_to takes"):
        rank_space(resnet18, round_to=step)
