from __future__ import annotations

import json
from dataclasses import replace
from statistics import median
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from haloc.cost.predict import LEAST_ROWS, choose_rows, fit_predictor, parse_share
from haloc.cost.stagewise import KINDS, Chains, find_settings, fit, kind, prior_covariance
from haloc.cost.table import Table
from haloc.errors import CostError, SpecError
from haloc.forms import Dense, Spatial, Svd, Tucker2, stages
from haloc.shapes import LinearShape, as_deployed
from haloc.space import rank_space
from tests.cost.latencies import made_up_ms, made_up_table
from tests.space.inventories import inventory
from tests.test_shapes import conv


def block(channels, out_channels, size, stride=1, kernel=3):
    return conv(
        in_channels=channels, out_channels=out_channels, input_size=(size, size), stride=(stride, stride),
        kernel=(kernel, kernel), padding=(kernel // 2, kernel // 2),
    )  # fmt: skip


#: The layers of a ResNet, and all rows that its default space has.
LAYERS = inventory(
    block(64, 64, 56), block(64, 128, 56, 2), block(128, 128, 28), block(64, 128, 56, 2, kernel=1),
    block(128, 256, 28, 2), block(256, 256, 14), block(512, 512, 7), LinearShape(512, 1000),
)  # fmt: skip
ROWS = rank_space(LAYERS).rows()
TABLE = made_up_table(ROWS)


def measured(share, rows=ROWS, **table) -> Table:
    return made_up_table(choose_rows(rows, share), **table)


def relative_errors(predictor, rows=ROWS):
    unseen = [row for row in rows if row not in predictor.table]
    return [abs(predictor.price(*row).value / made_up_ms(*row) - 1) for row in unseen]


def test_a_fifth_of_the_rows_is_enough():
    predictor = fit_predictor(measured("20%"))
    errors = relative_errors(predictor)
    assert len(errors) > 0.75 * len(ROWS)
    assert median(errors) < 0.1


def test_measured_rows_are_left_as_they_are():
    predictor = fit_predictor(TABLE)
    assert all(predictor.price(*row) == TABLE.price(*row) for row in ROWS)
    assert (predictor.quantity, predictor.unit, predictor.count) == ("latency", "ms", len(ROWS))
    assert predictor.forms_of(LAYERS["a"].shape) == TABLE.forms_of(LAYERS["a"].shape)


def test_biases_make_no_difference():
    """Rows are as deployed, layers of an inventory may still have their bias in the BatchNorm behind them."""
    predictor = fit_predictor(measured("30%"))
    shape = block(64, 64, 28)
    assert not shape.bias
    assert predictor.price(shape, Tucker2(16, 16)) == predictor.price(as_deployed(shape), Tucker2(16, 16))


def test_more_rows_make_it_better():
    few, many = (fit_predictor(measured(share, noise=0.0)) for share in ("15%", "60%"))
    assert median(relative_errors(many)) < 0.7 * median(relative_errors(few))
    assert many.held_out_error < few.held_out_error


def test_errors_are_such_that_about_half_of_the_rows_are_within():
    predictor = fit_predictor(measured("25%"))
    prices = {row: predictor.price(*row) for row in ROWS if row not in predictor.table}
    within = [abs(price.value - made_up_ms(*row)) <= price.error for row, price in prices.items()]
    assert 0.25 < sum(within) / len(within) < 0.95
    assert all(0 < price.error < price.value for price in prices.values())


def test_the_error_grows_far_from_what_was_measured():
    predictor = fit_predictor(measured("30%"))
    near, far = (predictor.price(shape, Dense()) for shape in (block(64, 64, 48), block(2, 3000, 900, kernel=9)))
    assert far.error / far.value > 2 * near.error / near.value


def test_it_says_how_good_it_is():
    predictor = fit_predictor(TABLE)
    assert 0 < predictor.held_out_error < 0.1
    assert predictor.held_out_error < predictor.worst
    described = json.loads(json.dumps(predictor.to_dict()))
    assert described["rows"] == len(ROWS)
    assert described["held_out_error"] == predictor.held_out_error
    assert described["target"] == "cpu:eager:fp32:b1:t1"


def test_the_same_table_gives_the_same_predictor():
    first, second = (fit_predictor(measured("20%")) for _ in range(2))
    assert first.to_dict() == second.to_dict()
    assert all(first.price(*row) == second.price(*row) for row in ROWS)


def test_a_table_of_any_size_is_fitted_soon():
    rows = rank_space(LAYERS, forms=("tucker2", "tucker2-out", "svd", "spatial"), round_to=4).rows()
    assert len(rows) > 450
    table = made_up_table(rows)
    with threadpool_limits(1):  # threads of a BLAS that wait for each other on a busy machine count as work
        start = process_time()
        predictor = fit_predictor(table)
        assert process_time() - start < 6  # of one core; well under two on an idle machine
    assert predictor.count == len(rows)
    assert predictor.held_out_error < 0.1


def test_energies_are_predicted_too():
    rows = tuple(replace(row, energy_mj=3 * row.latency_ms) for row in TABLE.rows)
    predictor = fit_predictor(Table(TABLE.target, rows, TABLE.environment, "energy"))
    unseen = (block(64, 64, 28), Tucker2(24, 24))
    assert predictor.unit == "mJ"
    assert predictor.price(*unseen).value == pytest.approx(3 * fit_predictor(TABLE).price(*unseen).value, rel=0.05)


def test_too_few_rows_are_refused():
    with pytest.raises(CostError, match=f"needs at least {LEAST_ROWS} rows, the table for cpu.* has 7"):
        fit_predictor(made_up_table(ROWS[:7]))
    assert fit_predictor(made_up_table(ROWS[:8])).count == 8


def test_kinds_of_layers_that_were_never_measured_are_refused():
    predictor = fit_predictor(TABLE)
    with pytest.raises(CostError, match="fitted without any convolution in groups, so it cannot price dense"):
        predictor.price(conv(in_channels=64, out_channels=64, groups=64), Dense())
    assert predictor.price(block(64, 64, 56), Spatial(16)).value > 0


def test_layers_of_one_kind_only():
    rows = [(LinearShape(64 * width, 512), form) for width in (1, 2, 4) for form in (Dense(), Svd(8), Svd(16), Svd(32))]
    predictor = fit_predictor(made_up_table(rows))
    expected = made_up_ms(LinearShape(192, 512), Svd(16))
    assert predictor.price(LinearShape(192, 512), Svd(16)).value == pytest.approx(expected, rel=0.3)


def test_rows_are_chosen_over_all_layers_dense_ones_among_them():
    chosen = choose_rows(ROWS, "20%")
    assert len(chosen) == parse_share("20%", len(ROWS)) == 13
    assert chosen == choose_rows(ROWS, 13) == choose_rows(list(ROWS), "13")
    assert [row for row in ROWS if row in chosen] == list(chosen)
    assert {shape for shape, _ in chosen} == {shape for shape, _ in ROWS}
    assert sum(form == Dense() for _, form in chosen) >= 4


def test_few_rows_are_spread_over_the_layers():
    assert len({shape for shape, _ in choose_rows(ROWS, 5)}) == 5
    assert choose_rows(ROWS, "100%") == ROWS


def test_rows_are_chosen_from_very_many():
    rows = rank_space(LAYERS, round_to=1).rows()
    assert len(rows) > 1000
    chosen = choose_rows(rows, 20)
    assert len(set(chosen)) == 20
    assert set(chosen) <= set(rows)


@settings(max_examples=25, deadline=None)
@given(st.sets(st.sampled_from(ROWS), min_size=1), st.integers(1, 70))
def test_rows_chosen_are_distinct_rows_of_those_given(rows, count):
    rows = [row for row in ROWS if row in rows]
    chosen = choose_rows(rows, count)
    assert len(set(chosen)) == min(count, len(rows))
    assert set(chosen) <= set(rows)
    assert len({shape for shape, _ in chosen}) >= min(count, len({shape for shape, _ in rows}))


@pytest.mark.parametrize(
    ("text", "total", "count"),
    [("20%", 100, 20), ("20%", 86, 18), (" 12.5 % ", 16, 2), ("100%", 7, 7), ("1%", 3, 1), ("25", 86, 25), ("9", 4, 4)],
)
def test_shares(text, total, count):
    assert parse_share(text, total) == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a share of the rows"),
        ("a fifth", "expected a share of the rows"),
        ("-3", "expected a share of the rows"),
        ("0.2", "expected a share of the rows"),
        ("120%", "cannot be more than 100%"),
        ("0%", "at least one row"),
        ("0", "at least one row"),
    ],
)
def test_shares_that_are_none_are_refused(text, message):
    with pytest.raises(SpecError, match=message):
        parse_share(text, 50)


def test_chains_know_their_rows():
    rows = [(block(64, 64, 56), Tucker2(16, 16)), (block(64, 64, 56), Dense()), (LinearShape(8, 8), Svd(4))]
    chains = Chains.of(rows)
    assert (len(chains), len(chains.physics), list(chains.starts)) == (3, 6, [0, 3, 4])
    assert list(chains.sums(np.arange(6.0))) == [3, 3, 9]
    assert list(chains.shares(np.array([1.0, 2, 1, 5, 3, 1]))) == [0.25, 0.5, 0.25, 1, 0.75, 0.25]
    taken = chains.take([2, 0])
    assert list(taken.starts) == [0, 2]
    assert np.array_equal(taken.places, np.concatenate([chains.places[4:], chains.places[:3]]))


def test_every_stage_is_of_a_kind():
    assert [kind(stage) for stage in stages(block(64, 64, 56), Tucker2(8, 8))] == [KINDS[1], KINDS[0], KINDS[1]]
    assert kind(conv(in_channels=64, out_channels=64, groups=64)) == KINDS[2]
    assert kind(LinearShape(3, 4)) == KINDS[3]


def test_prices_that_are_pure_physics_are_found_again():
    """Fixed amounts per kernel, multiply-add, number and weight need no corrections, so few rows are enough."""
    chains = Chains.of(ROWS)
    prices = chains.sums(chains.physics @ np.array([0.01, 1e-8, 1e-7, 3e-7, 2e-7]))
    some = np.arange(0, len(ROWS), 4)
    measured = chains.take(some), prices[some], np.zeros(len(some))
    found, deviations = fit(*measured, find_settings(*measured)).predict(chains)
    assert np.abs(np.expm1(found - np.log(prices))).max() < 0.05
    assert np.median(deviations) < 0.1


def test_rows_tell_most_about_those_with_like_stages():
    layer = block(128, 128, 28)
    rows = [(layer, Tucker2(32, 32)), (layer, Tucker2(48, 48)), (layer, Dense()), (LinearShape(512, 1000), Dense())]
    covariance = prior_covariance(Chains.of(rows))
    assert covariance[0, 1] > covariance[0, 2] > covariance[0, 3]
