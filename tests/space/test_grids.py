from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from haloc.errors import FileFormatError
from haloc.factor.inspect import inspect
from haloc.forms import SCALINGS, Dense, Spatial, Svd, Tucker2, macs, params
from haloc.shapes import LinearShape, as_deployed
from haloc.space import Grid, LayerChoices, RankSpace, random_plan, rank_space
from tests.space.inventories import inventory
from tests.test_shapes import conv


def test_grids():
    assert list(Grid.of("tucker2", [(8, 8), (4, 4), (4, 4)])) == [Tucker2(4, 4), Tucker2(8, 8)]
    assert Grid.of("tucker2", [(4, 2), (4, 8), (6, 1)]).runs == (((4,), (2, 8)), ((6,), (1,)))
    assert list(Grid.of("spatial", [(4,), (8,)])) == [Spatial(4), Spatial(8)]
    grid = Grid("tucker2", (((4,), range(4, 13, 4)), ((8,), range(4, 9, 4))))
    assert len(grid) == 5
    assert Tucker2(8, 8) in grid
    assert Tucker2(8, 12) not in grid
    assert Svd(4) not in grid
    assert Dense() not in grid


def test_dense_comes_first_and_is_there_when_nothing_else_is():
    grid = Grid.of("svd", [(4,)])
    assert list(LayerChoices((), (grid,))) == [Dense(), Svd(4)]
    assert Dense() in LayerChoices((), (grid,))
    assert Dense() not in LayerChoices((), (grid,), dense=False)
    assert len(LayerChoices(())) == 1


def test_rows_are_distinct_and_by_shape_with_dense_first():
    wide, narrow = LinearShape(64, 64, bias=False), LinearShape(64, 64, positions=7)
    layers = inventory(wide, (narrow, LinearShape(64, 64)), conv(in_channels=1, out_channels=2, groups=1))
    rows = rank_space(layers, round_to=8, names="a").rows()
    forms = [Dense(), Svd(8), Svd(16), Svd(24)]
    assert rows[:5] == (*((as_deployed(wide), form) for form in forms), (narrow, Dense()))
    assert [form for _, form in rows[5:]] == [Dense()]
    assert len(rows) == len(set(rows)) == 6
    rows = rank_space(layers, round_to=8, dense=False, names="a").rows()
    assert [form for shape, form in rows if shape == as_deployed(wide)] == [Dense(), *map(Svd, range(8, 65, 8))]


class Awkward(nn.Module):
    """A convolution called twice, a BatchNorm, attention, a parametrised layer, and one that is never called."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.normed = weight_norm(nn.Linear(16, 16))
        self.unused = nn.Linear(16, 16)
        self.last = nn.Linear(16, 24)

    def forward(self, images):
        maps = self.norm(self.conv(self.conv(images)[..., ::2, ::2]))
        tokens = maps.flatten(2).transpose(1, 2)
        return self.last(self.normed(self.attention(tokens, tokens, tokens)[0]))


def test_layers_and_what_is_outside_add_up_to_the_network():
    layers = inspect(Awkward(), torch.randn(1, 16, 8, 8))
    space = rank_space(layers, round_to=4)
    assert len(space.layers["conv"].calls) == 2
    for plan in ({}, *(random_plan(space, seed) for seed in range(10))):
        chosen = [(choices.calls, plan.get(name, Dense())) for name, choices in space.layers.items()]
        total = sum(macs(call, form) for calls, form in chosen for call in calls)
        assert total + space.outside["macs"] == layers.macs_of(plan)
        # A layer has its weights once, however often it is called.
        assert sum(params(calls[0], form) for calls, form in chosen) + space.outside["params"] == layers.params_of(plan)


def test_what_is_outside_worked_out_by_hand():
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
    assert rank_space(inspect(model, torch.randn(1, 8, 4, 4))).outside == {"macs": 0, "params": 16}
    # The spare layer's 8·8 + 8 are outside.
    model.spare = nn.Linear(8, 8)
    model.forward = lambda images: model[1](model[0](images))
    assert rank_space(inspect(model, torch.randn(1, 8, 4, 4))).outside == {"macs": 0, "params": 16 + 72}


def test_weights_that_layers_share_are_taken_off_again():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    # Either layer counts its 64 weights, and the network has them once.
    assert rank_space(inspect(model, torch.randn(1, 8))).outside == {"macs": 0, "params": -64}


def listed(space: RankSpace) -> dict:
    return {name: (choices.calls, list(choices)) for name, choices in space.layers.items()}


@pytest.mark.parametrize(
    "choice",
    [{}, {"forms": tuple(SCALINGS)}, {"forms": ("tucker2-out", "tucker2"), "dense": False}, {"equal": False},
     {"ratio": 0.3}, {"names": ["fc"]}],
)  # fmt: skip
def test_to_json_and_back(resnet18, choice):
    space = rank_space(resnet18, **choice)
    again = RankSpace.from_dict(json.loads(json.dumps(space.to_dict())))
    assert listed(again) == listed(space)
    assert list(again.layers) == list(space.layers)
    assert again.outside == space.outside
    assert again.size == space.size
    assert again.rows() == space.rows()
    assert RankSpace.from_dict(again.to_dict()) == again


def test_json_worked_out_by_hand():
    choices = LayerChoices((LinearShape(8, 8),), (Grid.of("svd", [(2,), (4,)]),), dense=False)
    row = {"name": "fc", "forms": [{"form": "svd", "rank": 2}, {"form": "svd", "rank": 4}], "dense": False}
    shape = {"type": "linear", "in_features": 8, "out_features": 8, "bias": True, "positions": 1}
    space = RankSpace({"fc": choices}, {"macs": 3, "params": 5})
    assert space.to_dict() == {"layers": [row | {"calls": [shape]}], "outside": {"macs": 3, "params": 5}}
    assert RankSpace.from_dict(space.to_dict()) == space
    assert RankSpace.from_dict({"layers": [], "outside": {}}) == RankSpace({})


def test_forms_keep_their_order_whatever_it_is():
    """Two grids of one form, the second of which begins below the end of the first; and ranks that fall."""
    first, second = Grid.of("tucker2", [(16, 16), (32, 32)]), Grid.of("tucker2", [(16, 32), (48, 32)])
    falling = Grid("tucker2", (((8,), (8,)), ((4,), (4,))))
    space = RankSpace({"a": LayerChoices((conv(),), (first, second, Grid.of("spatial", [(4,)]), falling))})
    again = RankSpace.from_dict(space.to_dict())
    assert list(again.layers["a"]) == list(space.layers["a"])
    assert again.layers["a"].grids[:2] == (first, second)


ROW = {
    "name": "a",
    "calls": [{"type": "linear", "in_features": 8, "out_features": 8}],
    "forms": [{"form": "svd", "rank": 2}],
    "dense": True,
}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "not a rank space"),
        ([], "not a rank space"),
        ({"outside": {}}, "not a rank space"),
        ({"layers": {"a": ROW}, "outside": {}}, "not a rank space"),
        ({"layers": [ROW]}, "what lies outside of the layers .* got None"),
        ({"layers": [ROW], "outside": {"macs": 1.5}}, "as whole numbers"),
        ({"layers": [ROW], "outside": {"macs": True}}, "as whole numbers"),
        ({"layers": [3], "outside": {}}, "has a name of its own, got None"),
        ({"layers": [ROW | {"name": 3}], "outside": {}}, "has a name of its own, got 3"),
        ({"layers": [ROW, ROW], "outside": {}}, "has a name of its own, got 'a'"),
    ],
)
def test_what_is_no_rank_space_is_refused(value, message):
    with pytest.raises(FileFormatError, match=message):
        RankSpace.from_dict(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"calls": None}, "malformed"),
        ({"calls": [{"type": "pool"}]}, "expected a shape"),
        ({"calls": [{"type": "linear", "in_features": "8", "out_features": 8}]}, "in_features cannot be '8'"),
        ({"calls": [{**json.loads(json.dumps(rank_space(inventory(conv())).to_dict()))["layers"][0]["calls"][0],
                     "groups": 3}]}, "3 groups do not divide"),
        ({"forms": 3}, "malformed"),
        ({"forms": [{"form": "svt", "rank": 2}]}, "unknown form 'svt'.* Did you mean 'svd'"),
        ({"forms": [{"form": "svd", "rank": 9}]}, "rank 9 is outside 1..8"),
        ({"forms": [{"form": "spatial", "rank": 2}]}, "takes svd, not spatial"),
        ({"forms": [{"form": "dense"}]}, "dense is not listed"),
        ({"forms": ROW["forms"] * 2}, "listed once"),
        ({"forms": [], "dense": False}, "true where there is no form"),
        ({"dense": 1}, "dense is true or false"),
        ({"dense": None}, "dense is true or false"),
    ],
)  # fmt: skip
def test_malformed_layers_are_refused_by_name(change, message):
    with pytest.raises(FileFormatError, match=f"layer 'a' of the rank space.*{message}"):
        RankSpace.from_dict({"layers": [ROW | change], "outside": {}})
    for key in set(change) - {"name"}:
        with pytest.raises(FileFormatError, match=f"layer 'a' of the rank space is incomplete .*'{key}'"):
            RankSpace.from_dict({"layers": [{k: v for k, v in ROW.items() if k != key}], "outside": {}})
