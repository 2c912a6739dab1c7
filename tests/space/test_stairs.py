from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from haloc.space import edges, staircase


def test_a_staircase_worked_out_by_hand():
    steps = {4: 1.0, 8: 1.01, 12: 2.0, 16: 1.98, 20: 2.9, 24: 3.0, 28: 3.2}
    # From dense (3.1) down: 28 costs more, 24 and 20 are within 5%, 16 is the first step, 12 is on it, 8 the next.
    assert staircase(steps, dense=3.1, tolerance=0.05) == (8, 16, 20)
    # With nothing forgiven every rank stays that is cheaper than the next.
    assert staircase(steps, dense=3.1, tolerance=0.0) == (4, 8, 16, 20, 24)
    assert staircase(steps, dense=1.0) == ()
    assert staircase({}, dense=1.0) == ()


def test_small_steps_add_up():
    """Each rank is 2% cheaper than the next one: compared with that none would stay, with the last kept some do."""
    slope = {rank: 1.02**rank for rank in range(1, 9)}
    assert staircase(slope, dense=1.02**9, tolerance=0.03) == (1, 3, 5, 7)


def test_edges_of_two_ranks_worked_out_by_hand():
    prices = {(8, 8): 2.0, (8, 4): 1.99, (4, 8): 1.5, (4, 4): 1.2, (4, 2): 1.2, (2, 8): 1.4, (2, 2): 1.6}
    # (8, 4) is on the step of (8, 8), (4, 2) on that of (4, 4), and (2, 2) is dearer than what is larger.
    assert edges(prices, dense=3.0, tolerance=0.03) == ((2, 8), (4, 4), (4, 8), (8, 8))
    assert edges(prices, dense=1.45, tolerance=0.03) == ((2, 8), (4, 4))
    assert edges(prices, dense=1.45, tolerance=0.1) == ((4, 4),)


@given(
    st.dictionaries(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.floats(0.1, 10), max_size=30),
    st.floats(0.1, 10), st.floats(0, 0.3),
)  # fmt: skip
def test_edges_are_worth_their_price_and_miss_nothing(prices, dense, tolerance):
    kept = edges(prices, dense, tolerance)
    assert set(kept) <= set(prices)
    assert all(prices[setting] * (1 + tolerance) < dense for setting in kept)
    for setting, price in prices.items():
        larger = [prices[k] for k in kept if k != setting and k[0] >= setting[0] and k[1] >= setting[1]]
        covered = any(other <= price * (1 + tolerance) for other in [dense, *larger])
        assert covered != (setting in kept)


@given(st.dictionaries(st.integers(1, 99), st.floats(0.1, 10), max_size=20), st.floats(0.1, 10), st.floats(0, 0.3))
def test_a_staircase_climbs(prices, dense, tolerance):
    kept = [prices[rank] for rank in staircase(prices, dense, tolerance)]
    assert all(low * (1 + tolerance) < high for low, high in pairwise([*kept, dense]))
