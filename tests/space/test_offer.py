from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haloc.errors import CostError, SpecError
from haloc.forms import SCALINGS, Dense, Spatial, Svd, Tucker2, families, full_ranks, gains, ranks
from haloc.inventory import Inventory, LayerInfo
from haloc.shapes import LinearShape
from haloc.space import Grid, rank_space
from tests.space.inventories import inventory
from tests.test_shapes import conv

ALL = tuple(SCALINGS)


def test_resnet18_has_the_papers_number_of_rank_settings(resnet18, threes):
    """The paper, Question 1: 2.2e71 combinations for the sixteen 3×3 layers."""
    space = rank_space(resnet18, forms=("tucker2",), round_to=1, equal=False, names=threes, dense=False)
    assert len(space.open_layers) == 16
    assert space.size == 2**237
    assert f"{space.size:.1e}" == "2.2e+71"


def test_the_design_principles_bring_it_near_the_papers_other_number(resnet18, threes):
    """The paper, Question 1: 7.8e13 after Design Principles 1 and 2."""
    space = rank_space(resnet18, forms=("tucker2",), names=threes, dense=False)
    assert space.size == 4**5 * 8**8 * 16**3 == 2**46
    assert 0.85 < space.size / 7.8e13 < 1.15


def test_resnet18_by_default(resnet18):
    space = rank_space(resnet18)
    assert len(space.layers) == len(resnet18) == 21
    assert len(space.rows()) == 86
    assert list(space.layers["layer1.0.conv1"]) == [Dense(), *(Tucker2(r, r) for r in (16, 32, 48))]
    assert list(space.layers["layer2.0.downsample.0"]) == [Dense(), Svd(16), Svd(32)]
    assert [ranks(form)[0] for form in space.layers["fc"] if form != Dense()] == list(range(32, 321, 32))


def test_settings_are_counted_as_they_are_listed(resnet18):
    for equal, dense in product((True, False), repeat=2):
        space = rank_space(resnet18, forms=ALL, equal=equal, dense=dense)
        listed = {name: list(layer) for name, layer in space.layers.items()}
        assert all(len(forms) == len(set(forms)) == len(space.layers[name]) for name, forms in listed.items())
        assert all(form in space.layers[name] for name, forms in listed.items() for form in forms)
        assert prod(map(len, listed.values())) == space.size


def test_a_space_of_all_ranks_knows_its_size_at_once(resnet18):
    start = process_time()
    size = rank_space(resnet18, round_to=1, equal=False).size
    assert size > 10**75
    assert process_time() - start < 5  # listing its settings would take minutes


def test_narrow_layers_still_have_a_setting(resnet18):
    space = rank_space(resnet18, forms=("tucker2",), round_to=32, dense=False)
    assert list(space.layers["conv1"]) == [Tucker2(3, 3)]
    space = rank_space(resnet18, forms=("tucker2",), round_to=32, equal=False, dense=False)
    assert {form.rank_in for form in space.layers["conv1"]} == {3}


def test_one_sided_and_spatial_forms():
    layers = inventory(conv(in_channels=32, out_channels=48, stride=(1, 1)))
    (out,) = rank_space(layers, forms=["tucker2-out"], round_to=16).layers["a"].grids
    # Out: r·(32·9 + 48) must be below 48·32·9 for a saving, so r ≤ 41.
    assert list(out) == [Tucker2(16, 32), Tucker2(32, 32)]
    (into,) = rank_space(layers, forms=["tucker2-in"], round_to=8).layers["a"].grids
    # In: r·(32 + 48·9) < 48·32·9, so r ≤ 29.
    assert list(into) == [Tucker2(48, 8), Tucker2(48, 16), Tucker2(48, 24)]
    (spatial,) = rank_space(layers, forms=["spatial"], round_to=20).layers["a"].grids
    # Spatial: r·3·(32 + 48) < 48·32·9, so r ≤ 57 of the full 96.
    assert list(spatial) == [Spatial(20), Spatial(40)]
    everything = rank_space(layers, forms=["spatial"], round_to=20, dense=False).layers["a"]
    assert [form.rank for form in everything] == [20, 40, 60, 80]


def test_a_setting_that_two_forms_share_is_offered_once():
    layers = inventory(conv(in_channels=32, out_channels=64))
    choices = rank_space(layers, forms=("tucker2-out", "tucker2"), round_to=16).layers["a"]
    assert [list(grid) for grid in choices.grids] == [
        [Tucker2(16, 16), Tucker2(32, 32)],
        [Tucker2(16, 32), Tucker2(48, 32)],
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 14), st.integers(1, 14), st.sampled_from([(3, 3), (1, 3), (1, 1)]), st.integers(1, 2),
    st.integers(1, 5), st.integers(1, 3), st.booleans(), st.booleans(), st.sets(st.sampled_from(ALL), min_size=1),
)  # fmt: skip
def test_the_settings_are_those_of_the_grid_that_save_something(
    group_in, group_out, kernel, stride, step, groups, bias, equal, forms
):
    shape = conv(
        in_channels=groups * group_in, out_channels=groups * group_out, groups=groups, kernel=kernel, bias=bias,
        stride=(stride, stride), padding=tuple(k // 2 for k in kernel), input_size=(7, 9),
    )  # fmt: skip
    layers = inventory(shape, (shape, shape))
    with_dense = rank_space(layers, forms=sorted(forms), round_to=step, equal=equal)
    without = rank_space(layers, forms=sorted(forms), round_to=step, equal=equal, dense=False)
    for name in "ab":
        offered = list(with_dense.layers[name])
        assert offered[0] == Dense()
        assert set(offered[1:]) == {form for form in without.layers[name] if gains(shape, form)}
        assert len(set(offered)) == len(offered) == len(with_dense.layers[name])
        assert all(ranks(form) != full_ranks(shape, form.name) for form in offered[1:])


def test_only_the_layers_named_are_open(resnet18):
    space = rank_space(resnet18, names=["fc", "layer1.0.conv1"])
    assert list(space.open_layers) == ["layer1.0.conv1", "fc"]
    assert space.size == 4 * 11
    assert list(space.layers["layer4.0.conv1"]) == [Dense()]


def test_layers_that_were_not_called_are_left_out():
    unused = LayerInfo("z", "Conv2d", (), 10, 0, (), "not called in this forward pass")
    called = inventory(LinearShape(512, 512))
    space = rank_space(Inventory((*called.layers, unused), called.macs, called.params))
    assert list(space.layers) == ["a"]


@dataclass
class Price:
    value: float


class Steps:
    """Prices that climb with the largest rank in steps of 16, for the forms that were asked for."""

    def __init__(self, *forms, dense=10.0):
        self.forms, self.dense = forms, dense

    def forms_of(self, shape):
        return {form: None for form in self.forms if form == Dense() or form.name in families(shape)}

    def price(self, shape, form):
        if form == Dense():
            return Price(self.dense)
        return Price(float(-(-max(ranks(form)) // 16)))


EVERY_FOURTH = [Tucker2(rank, rank) for rank in range(4, 65, 4)]


def test_auto_keeps_the_edges():
    layers = inventory(conv(in_channels=64), (conv(in_channels=64), conv(in_channels=64)), LinearShape(64, 64))
    cost = Steps(Dense(), *EVERY_FOURTH, *map(Svd, (8, 16, 24)), dense=3.5)
    space = rank_space(layers, round_to="auto", cost=cost)
    expected = [Dense(), Tucker2(16, 16), Tucker2(32, 32), Tucker2(48, 48)]
    assert list(space.layers["a"]) == list(space.layers["b"]) == expected
    assert list(space.layers["c"]) == [Dense(), Svd(16), Svd(24)]
    assert space.layers["a"].grids == (Grid.of("tucker2", [(16, 16), (32, 32), (48, 48)]),)


def test_auto_leaves_a_layer_dense_that_nothing_makes_faster():
    cost = Steps(Dense(), *EVERY_FOURTH, dense=1.0)
    for dense in (True, False):
        space = rank_space(inventory(conv()), round_to="auto", cost=cost, dense=dense)
        assert list(space.layers["a"]) == [Dense()]
    only_dense = rank_space(inventory(conv()), round_to="auto", cost=Steps(Dense()))
    assert list(only_dense.layers["a"]) == [Dense()]


def test_auto_takes_only_the_forms_asked_for():
    cost = Steps(Dense(), Tucker2(16, 16), Tucker2(32, 16), Tucker2(16, 64), Tucker2(128, 32), Spatial(8))
    layers = inventory(conv())

    def offered(**choice):
        return set(rank_space(layers, round_to="auto", cost=cost, **choice).layers["a"]) - {Dense()}

    assert offered() == {Tucker2(16, 16)}
    assert offered(forms=["tucker2-out", "spatial"]) == {Tucker2(16, 64), Spatial(8)}
    assert offered(forms=["tucker2-in"]) == {Tucker2(128, 32)}
    assert offered(equal=False) == {Tucker2(16, 16), Tucker2(32, 16), Tucker2(16, 64), Tucker2(128, 32)}


@pytest.mark.parametrize("cost", [Steps(), Steps(Dense(), Spatial(8)), Steps(Dense(), Tucker2(8, 4))])
def test_auto_without_prices_says_which_layer(cost):
    with pytest.raises(CostError, match="no prices for layer 'a' as tucker2 with equal ranks; measure"):
        rank_space(inventory(conv()), round_to="auto", cost=cost)


@pytest.mark.parametrize("step", [0, -4, "automatic", 1.5, True])
def test_steps_that_are_none_are_refused(resnet18, step):
    with pytest.raises(SpecError, match="round_to takes"):
        rank_space(resnet18, round_to=step)


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"forms": ["tucker"]}, "unknown form 'tucker', expected some of .* Did you mean 'tucker2'"),
        ({"names": ["fcc"]}, "there is no layer 'fcc'. Did you mean 'fc'"),
        ({"round_to": "auto"}, "belong together"),
        ({"cost": Steps()}, "belong together"),
        ({"round_to": "auto", "cost": Steps(Dense(), *EVERY_FOURTH, Svd(8)), "tolerance": -1}, "tolerance is a share"),
    ],
)
def test_wrong_choices_are_refused(resnet18, choice, text):
    with pytest.raises(SpecError, match=text):
        rank_space(resnet18, **choice)
