"""Where the probabilities of a search begin: all candidates alike, or what another method thinks of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from haloc.methods.budget import Limit
from haloc.methods.solve import Losses

Vector = NDArray[np.float64]

_ROUNDS = 60
_HOT = 1e4


def boltzmann(losses: Losses, limits: Sequence[Limit], spread: float) -> dict[str, Vector]:
    """Alphas with p_ij ∝ exp(−(loss_ij + μ cost_ij) / τ): what is good for its price is likely.

    μ is chosen so that the network keeps to its budgets in the mean over all paths, and τ so that the entropy is
    ``spread`` of the most that it can be within them: where all candidates are alike, or where only prices count.

    Args:
        losses: What another method found; they add up over the layers.
        limits: What the network may cost.
        spread: From 0, where all is decided, to 1, where nothing is.
    """
    rows = {name: np.maximum(np.array(row, dtype=float), 0.0) for name, row in losses.items()}
    worst = max((row[np.isfinite(row)].max() for row in rows.values() if np.isfinite(row).any()), default=1.0)
    worst = worst if worst > 0 else 1.0
    rows = {name: np.where(np.isfinite(row), row, 10 * worst + 1) for name, row in rows.items()}
    prices = {name: _prices(name, limits) for name in rows}

    def alphas(tau: float, mu: float) -> dict[str, Vector]:
        return {name: -(row + mu * prices[name]) / tau for name, row in rows.items()}

    def held(tau: float) -> dict[str, Vector]:
        """The alphas at a spread, with the least μ that keeps to the budgets."""
        return alphas(tau, _threshold(lambda mu: _over(alphas(tau, mu), limits) <= 0, 1e-9 * worst, 1e9 * worst))

    wanted = spread * _entropy_share(held(_HOT * worst))
    tau = _threshold(lambda tau: _entropy_share(held(tau)) >= wanted, 1e-6 * worst, _HOT * worst)
    return {name: row - row.max() for name, row in held(tau).items()}


def _prices(name: str, limits: Sequence[Limit]) -> Vector:
    """What a layer's candidates take up of the budgets, all added up."""
    shares = [np.array(limit.prices.prices[name], dtype=float) / limit.budget for limit in limits]
    return np.array(shares).sum(axis=0)  # type: ignore[no-any-return]


def _softmax(alpha: Vector) -> Vector:
    powers = np.exp(alpha - alpha.max())
    chances: Vector = powers / powers.sum()
    return chances


def _over(alphas: dict[str, Vector], limits: Sequence[Limit]) -> float:
    """By how much of a budget the expected cost is above it, the worst of them."""
    chances = {name: _softmax(alpha) for name, alpha in alphas.items()}

    def expected(limit: Limit) -> float:
        rows = limit.prices.prices
        return limit.prices.rest + sum(float(chances[name] @ np.array(rows[name])) for name in chances)

    return max(expected(limit) / limit.budget - 1 for limit in limits)


def _entropy_share(alphas: dict[str, Vector]) -> float:
    """The entropy of all layers as a share of what it is where all candidates are alike."""
    chances = [_softmax(alpha) for alpha in alphas.values() if len(alpha) > 1]
    own = sum(float(-(p * np.log(np.maximum(p, 1e-300))).sum()) for p in chances)
    return own / max(sum(float(np.log(len(p))) for p in chances), 1e-300)


def _threshold(enough: Callable[[float], bool], low: float, high: float) -> float:
    """The least number from ``low`` to ``high``, to a thousandth of itself or better, that is enough."""
    for _ in range(_ROUNDS):
        if high / low < 1.001:
            break
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
