"""Ranks that variational Bayes tells from the noise of a weight, and all layers the same part of the way towards them.

The ranks: Nakajima, Sugiyama, Babacan, Tomioka, "Global analytic solution of fully-observed variational Bayesian matrix
factorization", JMLR 14, 2013, in the form of Nakajima, Tomioka, Sugiyama, Babacan, "Perfect dimensionality recovery by
variational Bayesian PCA", NIPS 2012. The way: Gusak et al., "Automated multi-stage compression of neural networks",
ICCV Workshops 2019 (MUSCO), where a layer goes a part of the way from its full rank to VBMF's, is fine-tuned, and goes
on. Here that part is what the budget asks for, in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, exp, inf, log

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor

from haloc.factor.calibrate import InputMoments
from haloc.factor.layers import Layer, layer_shape
from haloc.factor.modules import Factoriser
from haloc.factor.tensors import gram, unfold_in, unfold_out
from haloc.forms import Dense, Form, Spatial, Tucker2, full_ranks, ranks
from haloc.methods.evidence import Evidence
from haloc.methods.levels import level_evidence, standard
from haloc.methods.task import Method, Task

Vector = NDArray[np.float64]

#: At how many variances the free energy is looked at before the best is refined: it may have several minima.
_GRID = 200


def find(task: Task) -> Evidence:
    """How far every candidate is on the way from full rank to VBMF's."""
    return level_evidence(METHOD.name, task, ways_gone)


def ways_gone(layer: Layer, forms: Sequence[Form], moments: InputMoments | None = None) -> list[float]:
    """(full − r) / (full − VBMF's rank) of each form, of two ranks the larger; above 1 beyond VBMF's ranks.

    Forms that are not `standard` are out of the question. The method knows no data, so moments are not looked at.
    """
    shape = layer_shape(layer)
    own = standard(shape, forms)
    fulls, goals = full_ranks(shape, own[0].name), goal_ranks(layer, own[0].name)

    def way(form: Form) -> float:
        if form not in own:
            return 0.0 if isinstance(form, Dense) else inf
        steps = zip(ranks(form), fulls, goals, strict=True)
        # Where VBMF finds nothing to leave out, leaving out a single rank is the whole way.
        return max((full - rank) / max(full - goal, 1) for rank, full, goal in steps)

    return [way(form) for form in forms]


def goal_ranks(layer: Layer, family: str) -> tuple[int, ...]:
    """VBMF's rank, at least 1, for every rank of a form: that of the unfolding which this rank cuts.

    A grouped convolution has such a matrix per group and one rank for all of them, that of the group that needs most.
    """
    return tuple(max(1, *map(_rank, unfolding)) for unfolding in _unfoldings(layer, family))


def evbmf_rank(singular_values: Sequence[float] | Vector, shape: tuple[int, int]) -> tuple[int, float]:
    """The rank of a matrix under noise by empirical variational Bayes, and the variance of that noise.

    For a matrix of L × M, L ≤ M, α = L/M, with singular values γ_h, noise of variance σ² and x_h = γ_h² / (M σ²), the
    least free energy over everything but σ² is, up to constants and scale,

        Σ_h (x_h − log x_h) + Σ_{h: x_h > x̲} (log(τ_h + 1) + α log(τ_h / α + 1) − τ_h),
        τ_h = ½ (x_h − (1 + α) + √((x_h − (1 + α))² − 4α)).

    σ² is where that is least. The components with x_h > x̲ are kept; x̲ is where keeping begins to lower it.

    Args:
        singular_values: Of the matrix; those that are not given are taken for zero.
        shape: Of the matrix; which side is which does not matter.
    """
    small, large = sorted(shape)
    alpha = small / large
    squares = np.zeros(small)
    squares[: len(singular_values)] = np.sort(np.asarray(singular_values, dtype=float))[::-1] ** 2 / large
    if not squares.any():
        return 0, 0.0
    edge = _edge(alpha)

    def free_energy(logarithm: float) -> float:
        x = squares * exp(-logarithm)
        # Without the constant Σ log γ_h², which is infinite where the matrix has no full rank.
        return float(x.sum() + small * logarithm + _gain(x[x > edge], alpha).sum())

    low, high = _bounds(squares, alpha, edge)
    variance = exp(_least(free_energy, log(low), log(high)))
    return int((squares > edge * variance).sum()), variance


def _edge(alpha: float) -> float:
    """x̲ = (1 + τ̲)(1 + α/τ̲), with τ̲ the zero of the summand of components that are kept."""

    def summand(tau: float) -> float:
        return float(np.log1p(tau) + alpha * np.log1p(tau / alpha) - tau)

    about = 2.5129 * alpha**0.5  # exact for square matrices and near for all others
    tau = float(brentq(summand, about / 4, about * 4))
    return (1 + tau) * (1 + alpha / tau)


def _gain(x: Vector, alpha: float) -> Vector:
    """What keeping components adds to the free energy: nothing at x̲, less than nothing above."""
    centred = x - (1 + alpha)
    tau = (centred + np.sqrt(centred**2 - 4 * alpha)) / 2
    return np.asarray(np.log1p(tau) + alpha * np.log1p(tau / alpha) - tau)


def _bounds(squares: Vector, alpha: float, edge: float) -> tuple[float, float]:
    """Between which variances the right one is: at the most all of the matrix is noise, at the least its tail is."""
    tail = ceil(len(squares) / (1 + alpha)) - 1
    high = float(squares.mean())
    low = max(float(squares[tail]) / edge, float(squares[tail:].mean()))
    # A matrix that is exactly of low rank has no noise, and zero no logarithm.
    return min(max(low, 1e-12 * high), high), high


def _least(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one variable is least."""
    grid = np.linspace(low, high, _GRID)
    best = int(np.argmin([function(point) for point in grid]))
    around = (float(grid[max(best - 1, 0)]), float(grid[min(best + 1, _GRID - 1)]))
    refined = float(minimize_scalar(function, bounds=around, method="bounded").x) if around[0] < around[1] else high
    return min((refined, float(grid[best])), key=function)


def _unfoldings(layer: Layer, family: str) -> tuple[Tensor, ...]:
    """The matrices, one per group, that the ranks of a form cut: channels of one side × everything else."""
    stack = Factoriser(layer).factors(Dense()).core
    if family == Tucker2.name:
        return unfold_out(stack), unfold_in(stack)
    if family == Spatial.name:
        # The kernel's first axis goes with the input channels, the others with the outputs.
        stack = stack.reshape(*stack.shape[:2], stack.shape[2] * layer.weight.shape[2], -1)
    return (unfold_in(stack),)


def _rank(matrix: Tensor) -> int:
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    values = torch.linalg.eigvalsh(gram(wide)).clamp_min(0).sqrt()
    return evbmf_rank(values.cpu().numpy(), (matrix.shape[0], matrix.shape[1]))[0]


METHOD = Method("vbmf", "all layers go the same part of the way to the ranks of variational Bayes", find)
