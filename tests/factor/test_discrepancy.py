from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from haloc.errors import SpecError
from haloc.factor.discrepancy import discrepancies, kept_share, settings_at, tucker_weights
from haloc.factor.modules import Factoriser
from haloc.forms import Tucker2, params
from tests.factor.layers import lower_rank
from tests.test_shapes import conv


def test_the_number_of_weights_worked_out_by_hand():
    # F·r(1) + C·r(2) + r(1)·r(2)·K1·K2 = 128·8 + 64·4 + 8·4·9.
    assert tucker_weights(conv(), 8, 4) == 1024 + 256 + 288
    assert tucker_weights(conv(), 0.5, 0.5) == 64 + 32 + 2.25
    # Two groups of 64 output and 32 input channels.
    assert tucker_weights(conv(groups=2), 8, 4) == 2 * (512 + 128 + 288)


@pytest.mark.parametrize("groups", [1, 4])
def test_below_full_rank_it_is_what_is_built(groups):
    shape = conv(groups=groups, bias=True)
    assert tucker_weights(shape, 8, 4) == params(replace(shape, bias=False), Tucker2(8, 4))


def test_the_share_of_singular_values_worked_out_by_hand():
    # (4 + 3) / (4 + 3 + 2 + 1) of the one, 5 / (5 + 3 + 2) of the other.
    assert kept_share([4, 3, 2, 1], [5, 3, 2], 2, 1) == pytest.approx(0.7 * 0.5)
    assert kept_share([4, 3, 2, 1], [5, 3, 2], 4, 3) == 1


def test_equal_singular_values_keep_the_share_of_the_ranks():
    """Eq. (eq3): ρ = r(1)·r(2) / (C·F); and Eq. (deriv): ρ = (n − F·r(1) − C·r(2)) / (K1·K2·C·F)."""
    rho = kept_share([2.0] * 128, [2.0] * 64, 8, 4)
    assert rho == pytest.approx(8 * 4 / (64 * 128))
    assert rho == pytest.approx((tucker_weights(conv(), 8, 4) - 128 * 8 - 64 * 4) / (9 * 64 * 128))


def test_settings_of_one_number_of_weights_worked_out_by_hand():
    """F = 4, C = 3, K = 2: 4·r1 + 3·r2 + 4·r1·r2 for ranks below full.

    At 30 weights: r1 = 1 leaves 26 for 7·r2, and full (3) is 4 + 12 = 16; r1 = 2: 22 of 11·r2 is 2, full is 32;
    r1 = 3: 18 of 15·r2 is 1; r1 = 4 is full, so 3·r2 + 16·r2 and 30 of 19·r2 is 1.
    """
    shape = conv(in_channels=3, out_channels=4, kernel=(2, 2), bias=True)
    assert settings_at(shape, 30) == (Tucker2(1, 3), Tucker2(2, 2), Tucker2(3, 1), Tucker2(4, 1))
    # At 32 the full rank_in can be paid for with r1 = 1 and 2; with 1 that is not what 32 weights can do.
    assert settings_at(shape, 32) == (Tucker2(2, 3), Tucker2(3, 1), Tucker2(4, 1))
    # All 48 weights: the layer itself.
    assert settings_at(shape, 48) == (Tucker2(4, 3),)
    # r1 = r2 = 1 takes 4 + 3 + 4.
    assert settings_at(shape, 11) == (Tucker2(1, 1),)
    with pytest.raises(SpecError, match="10 weights are too few: ranks of 1 take 11"):
        settings_at(shape, 10)


@pytest.mark.parametrize("groups", [1, 2])
def test_no_setting_has_more_weights_and_each_has_the_largest_rank_in(groups):
    shape = conv(in_channels=24, out_channels=40, groups=groups)
    forms = settings_at(shape, 2000)
    assert len(forms) > 10
    for form in forms:
        assert params(shape, form) <= 2000
        if form.rank_in < shape.group_in:
            assert params(shape, Tucker2(form.rank_out, form.rank_in + 1)) > 2000
        elif form.rank_out < shape.group_out:
            assert params(shape, Tucker2(form.rank_out + 1, form.rank_in)) > 2000


def test_errors_are_those_of_the_factoriser():
    layer = nn.Conv2d(12, 12, 3)
    rows = discrepancies(layer, 500)
    assert [row.difference for row in rows] == sorted(row.form.rank_out - row.form.rank_in for row in rows)
    assert tuple(row.form for row in rows) == settings_at(conv(in_channels=12, out_channels=12), 500)
    assert all(row.weights <= 500 for row in rows)
    assert [row.error for row in rows] == [Factoriser(layer).error(row.form) for row in rows]


def test_a_layer_of_equal_ranks_is_met_by_equal_ranks():
    """A weight whose ranks are 4 and 4 has no error at 4/4, which takes 12·4 + 12·4 + 4·4·9 = 240 weights."""
    layer = lower_rank(nn.Conv2d(12, 12, 3, bias=False), 4, 4)
    best = min(discrepancies(layer, 240), key=lambda row: row.error)
    assert (best.form, best.weights, best.difference) == (Tucker2(4, 4), 240, 0)
    assert best.error == pytest.approx(0, abs=1e-4)


def test_layers_without_a_kernel_are_refused():
    with pytest.raises(SpecError, match="larger than 1×1"):
        discrepancies(nn.Conv2d(8, 8, 1), 64)
