"""Prices as sums over stages, learnt from a few measured rows. Numbers only; no torch.

A layer in some form is a chain of plain layers, its stages, and what the chain costs is the sum of what they cost. The
price of a stage is taken as ``physics × exp(correction)``. The physics is a fixed amount for each kernel started plus
so much for each multiply-add, number read, number written and weight, with rates that are not negative. The correction
is a smooth function of the stage's extents, a Gaussian process, so that a 1×1 seen in one layer tells about the 1×1s
of all others. Only sums over stages are ever measured; the corrections that explain them best are found by linearising
the logarithm of the sum a few times over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log2, prod

import numpy as np
from numpy.typing import NDArray

from haloc.cost.count import elements_read, elements_written
from haloc.forms import Form, stages
from haloc.shapes import LinearShape, Shape

Array = NDArray[np.float64]

#: What a stage can be.
KINDS = ("k×k convolution", "1×1 convolution", "convolution in groups", "linear layer")

#: Channels that are computed together where a machine works in blocks.
BLOCK = 16

#: Where the multiply-adds stand in the physics of a stage.
_MACS = 1

#: To which of three lengths each number of `_place` belongs: the channels', the positions' or the kernel's.
_LENGTH_OF = np.array([0, 0, 1, 1, 2, 2, 2, 2, 2])

#: Logarithms of what is likely before anything is measured: how strong the corrections are, the three lengths (in
#: doublings) over which they change, and the noise; and how far from it they may be.
PRIOR = np.log([0.5, 4.0, 4.0, 2.0, 0.03])
PRIOR_WIDTH = 0.7

#: A correction beyond e³ would be a stage that the physics does not describe at all.
_LARGEST = 3.0


@dataclass(frozen=True)
class Chains:
    """The stages of several rows, one after the other.

    Attributes:
        physics: For each stage what its cost is linear in.
        places: For each stage where it lies in the space over which corrections are smooth.
        filling: For each stage how many times the multiply-adds it has with channels in whole blocks.
        starts: For each row the index of its first stage.
    """

    physics: Array
    places: Array
    filling: Array
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Iterable[tuple[Shape, Form]]) -> Chains:
        """Describes the stages of rows of (shape, form)."""
        chains = [stages(shape, form) for shape, form in rows]
        flat = [stage for chain in chains for stage in chain]
        physics, places, filling = (np.array(list(map(describe, flat))) for describe in (_physics, _place, _filling))
        return cls(physics, places, filling, _starts(map(len, chains)))

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> Chains:
        """Some of the rows."""
        ends = np.append(self.starts[1:], len(self.physics))
        spans = [np.arange(self.starts[row], ends[row]) for row in rows]
        index = np.concatenate(spans)
        return Chains(self.physics[index], self.places[index], self.filling[index], _starts(map(len, spans)))

    def in_blocks(self, blocks: bool) -> Chains:
        """The rows on a machine that computes whole blocks of channels, or on one that does not."""
        if not blocks:
            return self
        physics = self.physics.copy()
        physics[:, _MACS] *= self.filling
        return replace(self, physics=physics)

    def sums(self, values: Array) -> Array:
        """Sums of one number per stage, row by row."""
        return np.add.reduceat(values, self.starts)

    def each(self, values: Array) -> Array:
        """One number per row, repeated for its stages."""
        return np.repeat(values, np.diff(np.append(self.starts, len(self.physics))))

    def shares(self, prices: Array) -> Array:
        """What part of its row's price each stage has."""
        return prices / self.each(self.sums(prices))


@dataclass(frozen=True)
class Settings:
    """What a fit is done with.

    Attributes:
        logarithms: Of strength, lengths and noise, as in `PRIOR`.
        blocks: Whether the machine computes whole blocks of channels.
    """

    logarithms: Array
    blocks: bool


@dataclass(frozen=True)
class StageModel:
    """A fitted model; see the module.

    Attributes:
        chains: What it was fitted on.
        settings: What it was fitted with.
        rates: The factors of the physics.
        weights: One number per stage of ``chains``: the corrections elsewhere are its products with the kernel.
        shares: What part of its row's price each stage of ``chains`` has.
        inverse: The inverse covariance of the rows.
    """

    chains: Chains
    settings: Settings
    rates: Array
    weights: Array
    shares: Array
    inverse: Array

    def predict(self, chains: Chains) -> tuple[Array, Array]:
        """The logarithms of the rows' prices and the standard deviations of these."""
        chains, logarithms = chains.in_blocks(self.settings.blocks), self.settings.logarithms
        across = _kernel(chains.places, self.chains.places, logarithms)
        corrections = np.clip(across @ self.weights, -_LARGEST, _LARGEST)
        prices = chains.physics @ self.rates * np.exp(corrections)
        shares = chains.shares(prices)
        known = _sum_blocks(across * shares[:, None] * self.shares, chains, self.chains)
        explained = np.einsum("ri,ij,rj->r", known, self.inverse, known)
        variance = _own_variance(chains, shares, logarithms) - explained
        return np.log(chains.sums(prices)), np.sqrt(np.maximum(variance, 0) + np.exp(2 * logarithms[-1]))


def find_settings(chains: Chains, prices: Array, doubts: Array) -> Settings:
    """The settings under which measured prices are most likely; for the arguments see `fit`."""
    plain, blocked = (_likeliest(chains.in_blocks(blocks), prices, doubts) for blocks in (False, True))
    # By one, so that machines count as working in blocks only where that clearly explains more.
    blocks = blocked[0] + 1 < plain[0]
    return Settings((blocked if blocks else plain)[1], blocks)


def fit(chains: Chains, prices: Array, doubts: Array, settings: Settings) -> StageModel:
    """Fits rates and corrections to measured prices.

    Args:
        chains: The rows.
        prices: What each costs.
        doubts: The relative errors of the prices, on top of the noise that all of them have.
        settings: See `find_settings`.
    """
    chains = chains.in_blocks(settings.blocks)
    rates = _rates(chains, prices)
    base = chains.physics @ rates
    kernel = _kernel(chains.places, chains.places, settings.logarithms)
    corrections = np.zeros(len(base))
    for _ in range(6):
        shares, targets = _linearised(chains, base, corrections, prices)
        covariance = _sum_blocks(kernel * shares[:, None] * shares, chains, chains)
        inverse: Array = np.asarray(np.linalg.inv(covariance + _noise(doubts, settings.logarithms)), dtype=np.float64)
        weights = shares * chains.each(inverse @ targets)
        corrections = np.clip(kernel @ weights, -_LARGEST, _LARGEST)
    return StageModel(chains, settings, rates, weights, shares, inverse)


def kind(stage: Shape) -> str:
    """Which of `KINDS` a stage is."""
    if isinstance(stage, LinearShape):
        return KINDS[3]
    if stage.groups > 1:
        return KINDS[2]
    return KINDS[1] if stage.pointwise else KINDS[0]


def prior_covariance(chains: Chains) -> Array:
    """How much each row tells about each other before anything is measured.

    Which part of a row's price each of its stages has is not known then; a machine is assumed that takes as long for
    twenty multiply-adds as for moving one number.
    """
    shares = chains.shares(chains.physics @ np.array([0, 1 / 20, 1, 1, 1]))
    kernel = _kernel(chains.places, chains.places, PRIOR)
    return _sum_blocks(kernel * shares[:, None] * shares, chains, chains)


def _starts(lengths: Iterable[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *lengths])[:-1]


def _physics(stage: Shape) -> list[float]:
    """One kernel started, multiply-adds, numbers read and written, weights."""
    return [1.0, float(stage.macs), float(elements_read(stage)), float(elements_written(stage)), float(stage.params)]


def _filling(stage: Shape) -> float:
    return prod(-(-width // BLOCK) * BLOCK / width for width in _widths(stage))


def _widths(stage: Shape) -> tuple[int, int]:
    if isinstance(stage, LinearShape):
        return stage.in_features, stage.out_features
    return stage.group_in, stage.group_out


def _place(stage: Shape) -> list[float]:
    """Logarithms to base 2 of the extents, so that distances are in doublings."""
    widths = map(log2, _widths(stage))
    if isinstance(stage, LinearShape):
        # Two doublings away from the 1×1 convolution that computes the same.
        return [*widths, log2(stage.positions), 0, 0, 0, 0, 0, 2]
    first, *rest = stage.kernel
    extents = (prod(stage.output_size), stage.images, first, prod(rest), prod(stage.stride), stage.groups)
    return [*widths, *map(log2, extents), 0]


def _rates(chains: Chains, prices: Array) -> Array:
    """Non-negative least squares in relative error."""
    from sklearn.linear_model import LinearRegression

    rows = np.add.reduceat(chains.physics, chains.starts, axis=0)
    largest = rows.max(axis=0)
    relative = rows / largest / prices[:, None]
    model = LinearRegression(positive=True, fit_intercept=False).fit(relative, np.ones(len(prices)))
    rates: Array = np.asarray(model.coef_, dtype=np.float64) / largest
    # No stage is free: what has no rate of its own still costs a little, and the correction does the rest.
    rates[0] = max(rates[0], 1e-3 * float(prices.min()))
    return rates


def _kernel(left: Array, right: Array, logarithms: Array) -> Array:
    """Matérn 3/2 covariance of the corrections of stages."""
    lengths = np.exp(logarithms[1:4])[_LENGTH_OF]
    left, right = left / lengths, right / lengths
    squares = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1) - 2 * left @ right.T
    distance = np.sqrt(3 * np.maximum(squares, 0))
    covariance: Array = np.exp(2 * logarithms[0]) * (1 + distance) * np.exp(-distance)
    return covariance


def _noise(doubts: Array, logarithms: Array) -> Array:
    """Covariance of what the stages do not explain."""
    return np.diag(np.exp(2 * logarithms[-1]) + doubts**2)


def _sum_blocks(values: Array, left: Chains, right: Chains) -> Array:
    """Sums of one number per pair of stages, over the stages of each pair of rows."""
    sums: Array = np.add.reduceat(np.add.reduceat(values, left.starts, axis=0), right.starts, axis=1)
    return sums


def _own_variance(chains: Chains, shares: Array, logarithms: Array) -> Array:
    """The variances of rows, without their covariances."""
    ends = np.append(chains.starts[1:], len(shares))
    own = []
    for start, end in zip(chains.starts, ends, strict=True):
        kernel = _kernel(chains.places[start:end], chains.places[start:end], logarithms)
        own.append(shares[start:end] @ kernel @ shares[start:end])
    return np.array(own)


def _linearised(chains: Chains, base: Array, corrections: Array, prices: Array) -> tuple[Array, Array]:
    """The logarithm of the sum around ``corrections``: shares of the stages, and what their sum must explain."""
    stage_prices = base * np.exp(corrections)
    shares = chains.shares(stage_prices)
    return shares, np.log(prices / chains.sums(stage_prices)) + chains.sums(shares * corrections)


def _likeliest(chains: Chains, prices: Array, doubts: Array) -> tuple[float, Array]:
    """Walks to where the prices surprise least, along one setting at a time, in ever smaller steps."""
    base = chains.physics @ _rates(chains, prices)
    shares, targets = _linearised(chains, base, np.zeros(len(base)), prices)

    def surprise(logarithms: Array) -> float:
        kernel = _kernel(chains.places, chains.places, logarithms)
        covariance = _sum_blocks(kernel * shares[:, None] * shares, chains, chains)
        factor = np.linalg.cholesky(covariance + _noise(doubts, logarithms))
        scaled = np.linalg.solve(factor, targets)
        prior = (((logarithms - PRIOR) / PRIOR_WIDTH) ** 2).sum()
        return float(scaled @ scaled / 2 + np.log(np.diag(factor)).sum() + prior / 2)

    best, lowest = PRIOR, surprise(PRIOR)
    for step in (0.7, 0.35, 0.18):
        while True:
            trials = [best + change * axis for axis in np.eye(len(best)) for change in (step, -step)]
            value, index = min((surprise(trial), index) for index, trial in enumerate(trials))
            if value > lowest - 1e-3:
                break
            best, lowest = trials[index], value
    return lowest, best
