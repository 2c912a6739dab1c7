from __future__ import annotations

import json

import pytest

from haloc.errors import FileFormatError, PlanError
from haloc.forms import Dense, Spatial, Svd, Tucker2
from haloc.inventory import Inventory, LayerInfo
from haloc.shapes import LinearShape
from tests.test_shapes import conv

LAYERS = Inventory(
    (
        LayerInfo("conv", "Conv2d", (conv(), conv(input_size=(28, 28))), 73_728, 2 * 73_728, ("tucker2", "spatial")),
        LayerInfo("fc", "Linear", (LinearShape(512, 1000),), 513_000, 512_000, ("svd",)),
        LayerInfo("up", "ConvTranspose2d", (), 100, 1_000, (), "transposed convolution"),
    ),
    macs=1_000_000,
    params=600_000,
)


def test_sums():
    assert [layer.name for layer in LAYERS.open_layers] == ["conv", "fc"]
    assert LAYERS.open_share == (2 * 73_728 + 512_000) / 1_000_000
    plan = {"fc": Svd(100), "up": Dense()}
    assert LAYERS.macs_of(plan) == 1_000_000 - 512_000 + 151_200
    assert LAYERS.params_of(plan) == 600_000 - 513_000 + 152_200
    form = Tucker2(32, 16)
    assert LAYERS["conv"].macs_as(form) == (64 * 16 * 3136 + 8704 * 784) + (64 * 16 * 784 + 8704 * 196)


def test_plans_are_checked_by_name_and_difference():
    LAYERS.check({"conv": Spatial(20), "fc": Dense()})
    with pytest.raises(PlanError, match="no layer 'conf'. Did you mean 'conv'"):
        LAYERS.check({"conf": Svd(2)})
    with pytest.raises(PlanError, match="'fc': svd 513 cannot be applied, rank 513 is outside 1..512"):
        LAYERS.check({"fc": Svd(513)})
    with pytest.raises(PlanError, match="'up': svd 1 cannot be applied, transposed"):
        LAYERS.check({"up": Svd(1)})
    with pytest.raises(ValueError, match="has no shape: transposed"):
        LAYERS["up"].shape  # noqa: B018


def test_save_and_load(tmp_path):
    LAYERS.save(tmp_path / "layers.json")
    assert Inventory.load(tmp_path / "layers.json") == LAYERS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "haloc-plan"}, "not a list of layers"),
        ({"format": 9}, "format 9 is not known"),
        ({"layers": [{"name": "x"}]}, "malformed"),
        ({"layers": 3}, "malformed"),
        ({"macs": None}, "malformed"),
    ],
)
def test_files_that_are_no_inventory_are_refused(tmp_path, change, message):
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(LAYERS.to_dict() | change))
    with pytest.raises(FileFormatError, match=message):
        Inventory.load(path)
