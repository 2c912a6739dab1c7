from __future__ import annotations

import numpy as np
import pytest

from haloc.methods.budget import limits_of
from haloc.methods.start import boltzmann
from tests.methods.tiny import network, rank_space_of

#: Dense, (1, 1) and (6, 6) of three layers; the second one does not care about its rank.
LOSSES = {"conv2": (0.0, 2.0, 0.5), "conv3": (0.0, 0.01, 0.005), "conv4": (0.0, float("inf"), 0.3)}


def chances(alphas) -> dict[str, np.ndarray]:
    return {name: np.exp(alpha) / np.exp(alpha).sum() for name, alpha in alphas.items()}


def entropy_share(alphas) -> float:
    return float(np.mean([-(p * np.log(p + 1e-300)).sum() / np.log(3) for p in chances(alphas).values()]))


@pytest.mark.parametrize("spread", [0.2, 0.5, 0.8])
def test_it_begins_within_the_budgets_and_as_undecided_as_it_is_told(spread):
    limits = limits_of(rank_space_of(network()), {"macs": "60%", "params": "70%"})
    alphas = boltzmann(LOSSES, limits, spread)
    most = entropy_share(boltzmann(dict.fromkeys(LOSSES, (0.0, 0.0, 0.0)), limits, 0.999))
    assert entropy_share(alphas) == pytest.approx(spread * most, abs=0.05)
    found = chances(alphas)
    for limit in limits:
        prices = limit.prices
        expected = prices.rest + sum(float(found[name] @ np.array(prices.prices[name])) for name in found)
        assert expected <= limit.budget * 1.001


def test_what_is_good_for_its_price_is_likely():
    limits = limits_of(rank_space_of(network()), "60%")
    found = chances(boltzmann(LOSSES, limits, 0.3))
    assert found["conv3"].argmax() == 1  # the cheapest, which loses next to nothing
    assert found["conv4"][1] < 1e-3  # what is not considered
    assert found["conv2"][1] < found["conv3"][1]


def test_a_budget_that_asks_for_nothing_leaves_the_best():
    limits = limits_of(rank_space_of(network()), "100%")
    found = chances(boltzmann(LOSSES, limits, 0.3))
    assert all(p.argmax() == 0 for p in found.values())


def test_a_tight_budget_leaves_the_losses_their_say():
    space = rank_space_of(network())
    limits = limits_of(space, 1.15 * limits_of(space, "100%")[0].prices.cheapest)
    one, other = (
        chances(boltzmann(losses, limits, 0.5)) for losses in (LOSSES, dict.fromkeys(LOSSES, (0.0, 0.0, 0.0)))
    )
    assert max(abs(one[name] - other[name]).max() for name in LOSSES) > 0.05


@pytest.mark.parametrize("loss", [0.0, -1e-9])
def test_losses_that_say_nothing_leave_it_to_the_prices(loss):
    limits = limits_of(rank_space_of(network()), "60%")
    alphas = boltzmann(dict.fromkeys(LOSSES, (0.0, loss, loss)), limits, 0.5)
    assert all(np.isfinite(alpha).all() for alpha in alphas.values())
