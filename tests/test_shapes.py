from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from haloc.errors import FileFormatError, SpecError
from haloc.shapes import ConvShape, LinearShape, shape_from_dict, shape_to_dict


def conv(**changes) -> ConvShape:
    values = {
        "in_channels": 64, "out_channels": 128, "kernel": (3, 3), "input_size": (56, 56), "stride": (2, 2),
        "padding": (1, 1), "dilation": (1, 1), "groups": 1, "bias": False,
    }  # fmt: skip
    return ConvShape(**values | changes)


def test_counts_worked_out_by_hand():
    assert conv().output_size == (28, 28)
    assert conv().params == 128 * 64 * 9 == 73_728
    assert conv().macs == 73_728 * 28 * 28
    assert conv(bias=True).params == 73_728 + 128
    assert conv(groups=4).params == 128 * 16 * 9
    assert conv(images=8).macs == 8 * conv().macs
    assert LinearShape(512, 1000).params == 513_000
    assert LinearShape(512, 1000, bias=False, positions=7).macs == 7 * 512_000


@given(
    size=st.integers(9, 16), kernel=st.integers(1, 4), stride=st.integers(1, 3), dilation=st.integers(1, 2),
    padding=st.one_of(st.integers(0, 3), st.just("same")),
)  # fmt: skip
def test_output_size_is_what_torch_gives(size, kernel, stride, dilation, padding):
    stride = 1 if padding == "same" else stride
    layer = nn.Conv2d(2, 2, (kernel, 3), stride=stride, padding=padding, dilation=dilation)
    pads = padding if padding == "same" else (padding, padding)
    shape = ConvShape(2, 2, (kernel, 3), (size, 12), (stride,) * 2, pads, (dilation,) * 2)
    assert tuple(layer(torch.zeros(1, 2, size, 12)).shape[2:]) == shape.output_size


def test_depthwise_and_pointwise():
    assert conv(in_channels=64, out_channels=64, groups=64).depthwise
    assert conv(in_channels=64, out_channels=128, groups=64).depthwise
    assert not conv(in_channels=1, out_channels=8).depthwise
    assert conv(kernel=(1, 1), padding=(0, 0)).pointwise
    assert not conv(kernel=(1, 3), padding=(0, 1)).pointwise


def test_bad_shapes_are_refused():
    with pytest.raises(SpecError, match="3 groups do not divide"):
        conv(groups=3)
    with pytest.raises(SpecError, match="equally many axes"):
        conv(stride=(1,))


@pytest.mark.parametrize("shape", [conv(), conv(padding="same", stride=(1, 1)), LinearShape(3, 4, False, 5)])
def test_json_round_trip(shape):
    assert shape_from_dict(json.loads(json.dumps(shape_to_dict(shape)))) == shape


@pytest.mark.parametrize("value", [None, {}, {"type": "cube"}, {"type": "linear"}, {"type": "linear", "rows": 3}])
def test_json_that_is_no_shape_is_refused(value):
    with pytest.raises(FileFormatError, match="shape"):
        shape_from_dict(value)
