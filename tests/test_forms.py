from __future__ import annotations

import json

import pytest

from haloc.errors import FileFormatError, SpecError
from haloc.forms import (
    Dense,
    Spatial,
    Svd,
    Tucker2,
    families,
    form_from_dict,
    form_to_dict,
    full_form,
    full_ranks,
    gains,
    macs,
    misfit,
    params,
    scaled_form,
    smallest_form,
    stages,
)
from haloc.shapes import LinearShape
from tests.test_shapes import conv

POSITIONS_IN, POSITIONS_OUT = 56 * 56, 28 * 28


def test_tucker2_counts_worked_out_by_hand():
    form = Tucker2(rank_out=32, rank_in=16)
    assert params(conv(), form) == 64 * 16 + 16 * 32 * 9 + 32 * 128 == 9_728
    assert macs(conv(), form) == 64 * 16 * POSITIONS_IN + (16 * 32 * 9 + 32 * 128) * POSITIONS_OUT
    assert params(conv(bias=True), form) == 9_728 + 128


def test_tucker2_at_full_rank_leaves_the_pointwise_layer_out():
    assert params(conv(), Tucker2(128, 16)) == 64 * 16 + 16 * 128 * 9
    assert params(conv(), Tucker2(32, 64)) == 64 * 32 * 9 + 32 * 128
    assert stages(conv(), Tucker2(128, 64)) == (conv(),)
    assert [len(stages(conv(), f)) for f in (Tucker2(128, 16), Tucker2(32, 64), Tucker2(32, 16))] == [2, 2, 3]


def test_spatial_counts_worked_out_by_hand():
    first, second = stages(conv(kernel=(3, 5), padding=(1, 2)), Spatial(20))
    assert (first.kernel, first.stride, first.padding, first.output_size) == ((3, 1), (2, 1), (1, 0), (28, 56))
    assert (second.kernel, second.stride, second.padding, second.output_size) == ((1, 5), (1, 2), (0, 2), (28, 28))
    assert macs(conv(kernel=(3, 5), padding=(1, 2)), Spatial(20)) == 64 * 20 * 3 * 28 * 56 + 20 * 128 * 5 * 28 * 28


def test_svd_counts_worked_out_by_hand():
    pointwise = conv(kernel=(1, 1), padding=(0, 0))
    assert macs(pointwise, Svd(16)) == (64 * 16 + 16 * 128) * POSITIONS_OUT
    assert params(LinearShape(512, 1000), Svd(100)) == 512 * 100 + 100 * 1000 + 1000
    assert macs(LinearShape(512, 1000, positions=3), Svd(100)) == 3 * (512 * 100 + 100 * 1000)


def test_ranks_of_groups_are_per_group():
    grouped = conv(groups=4)
    assert full_ranks(grouped, "tucker2") == (32, 16)
    assert params(grouped, Tucker2(8, 4)) == 4 * (16 * 4 + 4 * 8 * 9 + 8 * 32)


def test_the_bias_belongs_to_the_last_stage_only():
    for form in (Tucker2(32, 16), Tucker2(128, 16), Tucker2(32, 64), Spatial(20)):
        biases = [stage.bias for stage in stages(conv(bias=True), form)]
        assert biases == [False] * (len(biases) - 1) + [True]


def test_families_follow_from_the_kernel():
    assert families(conv()) == ("tucker2", "spatial")
    assert families(conv(kernel=(1, 3), padding=(0, 1))) == ("tucker2",)
    assert families(conv(kernel=(1, 1), padding=(0, 0))) == ("svd",)
    assert families(LinearShape(4, 4)) == ("svd",)


def test_full_and_scaled_ranks():
    assert full_form(conv(), "spatial") == Spatial(3 * 64)
    assert scaled_form(conv(), "tucker2", 0.5) == Tucker2(64, 32)
    assert scaled_form(conv(), "tucker2", 0.3, round_to=8) == Tucker2(40, 16)
    assert scaled_form(conv(), "tucker2", 0.0) == Tucker2(1, 1)
    assert scaled_form(conv(), "tucker2-out", 0.5) == Tucker2(64, 64)
    assert scaled_form(conv(), "tucker2-in", 0.5) == Tucker2(128, 32)
    assert smallest_form(conv(in_channels=3), "tucker2") == Tucker2(4, 3)


def test_gains():
    assert gains(conv(), Tucker2(32, 16))
    assert not gains(LinearShape(64, 10), Svd(9))
    assert gains(LinearShape(64, 10), Svd(8))


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (Tucker2(129, 8), "rank_out 129 is outside 1..128"),
        (Tucker2(8, 0), "rank_in 0 is outside 1..64"),
        (Spatial(193), "rank 193 is outside 1..192"),
        (Svd(4), "a 3×3 convolution 64→128 takes tucker2 or spatial, not svd"),
    ],
)
def test_misfits_name_the_difference(form, text):
    assert misfit(conv(), form) == text
    with pytest.raises(SpecError, match="does not fit"):
        stages(conv(), form)


@pytest.mark.parametrize("form", [Dense(), Tucker2(3, 4), Spatial(5), Svd(6)])
def test_json_round_trip(form):
    assert misfit(conv(), Dense()) is None
    assert form_from_dict(json.loads(json.dumps(form_to_dict(form)))) == form


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("svd", "expected a form"),
        ({"form": "svdd", "rank": 3}, "Did you mean 'svd'"),
        ({"form": "svd"}, "takes rank"),
        ({"form": "svd", "rank": 0}, "positive whole numbers"),
        ({"form": "svd", "rank": True}, "positive whole numbers"),
        ({"form": "tucker2", "rank": 3}, "takes rank_out and rank_in"),
        ({"form": "dense", "rank": 3}, "takes no rank"),
    ],
)
def test_json_that_is_no_form_is_refused(value, text):
    with pytest.raises(FileFormatError, match=text):
        form_from_dict(value)
