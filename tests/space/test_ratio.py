from __future__ import annotations

from math import prod, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haloc.errors import SpecError
from haloc.factor.discrepancy import tucker_weights
from haloc.forms import FORMS, SCALINGS, Dense, Svd, Tucker2, families, full_ranks, misfit
from haloc.shapes import LinearShape
from haloc.space import paper_step, rank_space
from haloc.space.ratio import line_reduction, rank_range, rank_reduction, ranks_within, ratio_settings
from tests.space.inventories import inventory
from tests.space.test_offer import Steps
from tests.test_shapes import conv


@pytest.mark.parametrize(
    ("channels", "step"), [(8, 4), (16, 4), (31, 4), (32, 8), (64, 16), (100, 16), (128, 16), (256, 32), (2048, 32)]
)
def test_steps_follow_the_papers_list_by_powers_of_two(channels, step):
    assert paper_step(conv(in_channels=channels, out_channels=2048), widest=512) == step
    assert paper_step(conv(in_channels=channels, out_channels=64), widest=64) == 4


def test_the_reduction_of_ranks_worked_out_by_hand():
    """F = C = 64, K = 3, α = 4: over F·C, C² + F² is 2 and F·C·K1·K2 is 9.

    So α_rank = 2·9 / (√(2² + 4·9²/4) − 2) = 18 / (√85 − 2) = 2.4932, as the paper's closed form has it.
    """
    reduction = rank_reduction(conv(in_channels=64, out_channels=64), 4)
    assert reduction == pytest.approx(18 / (sqrt(85) - 2), rel=1e-12)
    assert reduction == pytest.approx(2.4932, abs=1e-4)
    # Groups are layers of their own beside each other.
    assert rank_reduction(conv(in_channels=128, out_channels=128, groups=2), 4) == reduction


@given(
    st.integers(1, 600), st.integers(1, 600), st.sampled_from([(3, 3), (1, 3), (5, 2)]), st.integers(1, 3),
    st.floats(1, 1e6),
)  # fmt: skip
def test_reduced_ranks_leave_the_share_of_the_weights(group_in, group_out, kernel, groups, alpha):
    shape = conv(in_channels=groups * group_in, out_channels=groups * group_out, kernel=kernel, groups=groups)
    reduction = rank_reduction(shape, alpha)
    left = tucker_weights(shape, group_out / reduction, group_in / reduction)
    assert left == pytest.approx(groups * group_in * group_out * prod(kernel) / alpha, rel=1e-9)


def test_the_reduction_of_one_rank_worked_out_by_hand():
    # Rank 8 of 64 has 8·(64 + 64) = 1024 weights, a quarter of 64·64; the bias does not count.
    assert line_reduction(LinearShape(64, 64), "svd", 4) == 8
    shape = conv(in_channels=32, out_channels=48, bias=True)
    # A rank of the 96 has 3·32 + 3·48 = 240 of 13,824 weights: 14.4 ranks have a quarter, and 96 / 14.4 = 20/3.
    assert line_reduction(shape, "spatial", 4) == pytest.approx(20 / 3)
    # A rank of the 48 has 9·32 + 48 = 336 weights: 72/7 ranks have a quarter.
    assert line_reduction(shape, "tucker2-out", 4) == pytest.approx(48 / (72 / 7))
    # A rank of the 32 has 32 + 9·48 = 464 weights.
    assert line_reduction(shape, "tucker2-in", 4) == pytest.approx(32 / (3456 / 464))


@pytest.mark.parametrize(
    ("full", "reduction", "low", "high"),
    [
        (64, 6, 8, 16),
        (64, 2.5, 64 / 4.5, 64),  # 64 / 0.5 is beyond full rank
        (64, 2, 16, 64),  # 64 / 0
        (64, 1.2, 20, 64),  # 64 / −0.8
        (64, 98, 1, 1),  # less than one rank on both sides
        (3, 4, 1, 1.5),
    ],
)
def test_the_range_stays_within_the_ranks(full, reduction, low, high):
    assert rank_range(full, reduction) == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("low", "high", "full", "step", "expected"),
    [
        (14.2, 64, 64, 16, (16, 32, 48, 64)),
        (16 + 1e-12, 32 - 1e-12, 64, 16, (16, 32)),  # bounds that only rounding keeps off
        (17, 30, 64, 16, (16, 32)),  # empty: one to either side
        (1, 1.5, 64, 16, (16,)),  # nothing below
        (50, 60, 62, 16, (48,)),  # 64 would be more than full
        (1, 3, 3, 4, (3,)),  # less than one step
        (2.5, 5, 8, 1, (3, 4, 5)),
    ],
)
def test_ranks_within_a_range(low, high, full, step, expected):
    assert ranks_within(low, high, full, step) == expected


def test_both_orientations_worked_out_by_hand():
    """C = 256, F = 64, K = 3, α = 10: over F·C, C² + F² is 4.25 and F·C·K1·K2 is 9.

    α_rank = 10·(√(4.25² + 4·81/10) + 4.25) / 18 = 10·(7.1037 + 4.25) / 18 = 6.308; from 64/8.308 = 7.7 to
    64/4.308 = 14.9.
    """
    wide_in, wide_out = conv(in_channels=256, out_channels=64), conv(in_channels=64, out_channels=256)
    assert rank_reduction(wide_in, 10) == pytest.approx(6.308, abs=1e-3)
    # Tucker2(rank_out, rank_in): the larger rank is on the side of the 256 channels.
    assert ratio_settings(wide_in, "tucker2", 0.1, 4) == [(8, 8), (8, 32), (12, 12), (12, 48)]
    assert ratio_settings(wide_out, "tucker2", 0.1, 4) == [(8, 8), (12, 12), (32, 8), (48, 12)]
    # The paper's step for 64 channels is 16, of which no multiple lies in that range: 16 is the nearest.
    layers = inventory(wide_in, wide_out)
    assert list(rank_space(layers, ratio=0.1).layers["a"]) == [Dense(), Tucker2(16, 16), Tucker2(16, 64)]
    assert list(rank_space(layers, ratio=0.1).layers["b"]) == [Dense(), Tucker2(16, 16), Tucker2(64, 16)]
    finer = rank_space(layers, ratio=0.1, round_to=4, dense=False)
    assert list(finer.layers["a"]) == [Tucker2(8, 8), Tucker2(8, 32), Tucker2(12, 12), Tucker2(12, 48)]


def test_equal_modes_have_one_pair_and_narrow_networks_step_4():
    layers = inventory(conv(in_channels=64, out_channels=64))
    # α_rank = 2.49 (see above): from 14.2 to full rank, and 128·r + 9·r² is below 64·64·9 up to r = 57.
    for equal in (True, False):
        choices = rank_space(layers, ratio=0.25, equal=equal).layers["a"]
        assert list(choices) == [Dense(), *(Tucker2(r, r) for r in range(16, 57, 4))]
    every = rank_space(layers, ratio=0.25, dense=False).layers["a"]
    assert list(every) == [Tucker2(r, r) for r in range(16, 65, 4)]


def test_narrow_layers():
    # t = 12: α_rank = 2·(√(4 + 4·81/2) + 2) / 18 = 1.65, so from 12/3.65 = 3.3 to full rank.
    assert ratio_settings(conv(in_channels=12, out_channels=12), "tucker2", 0.5, 4) == [(4, 4), (8, 8), (12, 12)]
    # t = 3 is less than a step; 3 of 3 channels are 64 of 64.
    stem = conv(in_channels=3, out_channels=64)
    assert ratio_settings(stem, "tucker2", 0.5, 4) == [(3, 3), (64, 3)]
    assert list(rank_space(inventory(stem), ratio=0.5).layers["a"]) == [Dense(), Tucker2(3, 3)]


def test_scaled_ranks_are_multiples_of_the_step_too():
    # C/F = 100/64: 32 becomes 50, nearest 48; 48 becomes 75, nearest 80; full stays full.
    settings = ratio_settings(conv(in_channels=100, out_channels=64), "tucker2", 1, 16)
    assert settings == [(32, 32), (32, 48), (48, 48), (48, 80), (64, 64), (64, 100)]
    # 16 becomes 29.2; 32 is nearest, but there are only 31.
    assert ratio_settings(conv(in_channels=31, out_channels=17), "tucker2", 1, 16) == [(16, 16)]


def test_other_forms_with_a_ratio():
    # α_rank = 8 (see above): from 64/10 = 6.4 to 64/6 = 10.7.
    assert list(rank_space(inventory(LinearShape(64, 64)), ratio=0.25).layers["a"]) == [Dense(), Svd(8)]
    layers = inventory(conv(in_channels=32, out_channels=48))

    def offered(form):
        return [str(choice) for choice in rank_space(layers, forms=form, ratio=0.25, dense=False).layers["a"]]

    assert offered("spatial") == ["spatial 12", "spatial 16", "spatial 20"]  # from 96/8.67 = 11.1 to 96/4.67 = 20.6
    assert offered("tucker2-out") == ["tucker2 8/32", "tucker2 12/32", "tucker2 16/32"]  # from 48/6.67 to 48/2.67
    assert offered("tucker2-in") == ["tucker2 48/8", "tucker2 48/12"]  # from 32/6.30 = 5.1 to 32/2.30 = 13.9


@given(
    st.integers(1, 40), st.integers(1, 40), st.sampled_from([(3, 3), (1, 3), (1, 1)]), st.integers(1, 3),
    st.integers(1, 20), st.floats(1e-3, 1), st.sampled_from(tuple(SCALINGS)),
)  # fmt: skip
def test_every_setting_fits_and_there_is_one(group_in, group_out, kernel, groups, step, ratio, scaling):
    shape = conv(in_channels=groups * group_in, out_channels=groups * group_out, groups=groups, kernel=kernel)
    family = SCALINGS[scaling][0]
    if family not in families(shape):
        return
    settings = ratio_settings(shape, scaling, ratio, step)
    assert settings
    assert len(set(settings)) == len(settings)
    assert all(misfit(shape, FORMS[family](*setting)) is None for setting in settings)
    if scaling == "tucker2":
        assert all((out <= into) if group_out < group_in else (out >= into) for out, into in settings)
        assert all(rank % step == 0 or rank in full_ranks(shape, family) for setting in settings for rank in setting)
        assert {(min(setting),) * 2 for setting in settings} <= set(settings)


def test_the_space_of_a_ratio_is_small_and_lies_around_it(resnet18):
    whole, space = rank_space(resnet18), rank_space(resnet18, ratio=0.24)
    assert space.size < whole.size
    assert list(space.open_layers) == list(whole.open_layers)
    smallest = {name: list(choices)[1] for name, choices in space.open_layers.items()}
    largest = {name: list(choices)[-1] for name, choices in space.open_layers.items()}
    assert resnet18.params_of(smallest) < 0.24 * resnet18.params < resnet18.params_of(largest)


@pytest.mark.parametrize("ratio", [0, -0.5, 1.01, float("nan"), float("inf"), "0.5", True, [0.5]])
def test_ratios_that_are_none_are_refused(resnet18, ratio):
    with pytest.raises(SpecError, match="ratio is the share of the parameters that is to remain"):
        rank_space(resnet18, ratio=ratio)


def test_a_ratio_and_measured_prices_exclude_each_other(resnet18):
    with pytest.raises(SpecError, match="exclude each other"):
        rank_space(resnet18, ratio=0.5, round_to="auto", cost=Steps(Dense()))
    with pytest.raises(SpecError, match="belong together"):
        rank_space(resnet18, ratio=0.5, round_to="auto")
