"""The arithmetic of one group of channels: in which order they can go, what that costs, and how the others stand in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: What may be added to the covariance, as a part of its mean diagonal: what channels have to do with each other in some
#: pictures is not all true of others. Features that are read once for each picture, as by a classifier, may well be
#: more than the pictures are.
DAMPINGS = (1e-2, 1e-1, 1.0)


@dataclass(frozen=True, eq=False)
class Raw:
    """What hidden channels look like where they are read, in float64, as it was summed up.

    Attributes:
        mean: E[h], (channels,).
        second: E[h hᵀ].
        shifts: Whether something behind the reader could take a shift; moments are about zero otherwise.
    """

    mean: Tensor
    second: Tensor
    shifts: bool

    def damped(self, damping: float) -> Moments:
        """The same about the mean, and damped."""
        return moments(self.mean, self.second, shifts=self.shifts, damping=damping)


@dataclass(frozen=True, eq=False)
class Moments:
    """What hidden channels look like where they are read, in float64.

    Attributes:
        mean: E[h], (channels,), or 0 where moments are about zero.
        covariance: E[(h − E[h]) (h − E[h])ᵀ], damped.
    """

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True, eq=False)
class Order:
    """In which order channels go.

    Attributes:
        removed: The channels, the first to go first; one always stays and is not in it.
        errors: The share of the reader's output that is lost once so many of them are gone: ``errors[0]`` is 0.
        width: How many channels there are.
    """

    removed: Sequence[int]
    errors: Sequence[float]
    width: int

    def kept(self, width: int) -> list[int]:
        """The channels that are left when there are to be ``width`` of them, in their old order."""
        gone = set(self.removed[: self.width - width])
        return [channel for channel in range(self.width) if channel not in gone]

    def code(self, width: int) -> Tensor:
        """The same as a matrix (width, channels) of zeros and ones."""
        return torch.eye(self.width, dtype=torch.float64)[self.kept(width)]


def moments(mean: Tensor, second: Tensor, *, shifts: bool, damping: float) -> Moments:
    """From E[h] and E[h hᵀ]; about zero, where nothing behind the reader could take a shift."""
    mean = mean if shifts else torch.zeros_like(mean)
    covariance = second - torch.outer(mean, mean)
    covariance = (covariance + covariance.T) / 2
    level = covariance.diagonal().mean()
    added = damping * level if bool(level > 0) else torch.ones_like(level)
    return Moments(mean, covariance + added * torch.eye(len(mean), dtype=mean.dtype, device=mean.device))


def removal_order(rows: Tensor, seen: Moments, gone: int | None = None) -> Order:
    """Takes channels away one by one, always the one whose going costs least once all others have made up for it.

    For a reader W the least squared error of W h without channel j is |w_j|² / [C⁻¹]_jj, with C the covariance of h;
    the weights of the others that reach it, and the inverse for the next round, follow by one step of elimination
    (optimal brain surgeon, for columns).

    Args:
        rows: The reader's weights, (outputs, channels); every tap of a convolution makes rows of its own.
        seen: What the channels look like.
        gone: How many are to go at most; all but one, unless told otherwise.
    """
    width = rows.shape[1]
    # The Gram matrix tells all that is needed of the weights, and is smaller where a reader has many rows.
    gram, inverse = rows.T @ rows, torch.linalg.inv(seen.covariance)
    whole = float((gram * seen.covariance).sum())
    names, there = list(range(width)), torch.ones(width, dtype=torch.bool, device=rows.device)
    removed, errors, lost = [], [0.0], 0.0
    for _ in range(width - 1 if gone is None else min(gone, width - 1)):
        costs = (gram.diagonal() / inverse.diagonal()).masked_fill(~there, torch.inf)
        place = int(costs.argmin())
        lost += max(0.0, float(costs[place]))
        removed.append(names[place])
        errors.append(lost / whole if whole > 0 else 0.0)
        _eliminate(place, gram, inverse)
        there[place] = False
        left = there.nonzero().flatten()
        if len(left) < 0.8 * len(there):  # what is gone need not be carried along
            gram, inverse, there = gram[left][:, left], inverse[left][:, left], there[left]
            names = [names[each] for each in left.tolist()]
    return Order(removed, errors, width)


def _eliminate(place: int, gram: Tensor, inverse: Tensor) -> None:
    """One step, in place: W ← W − w_j [C⁻¹]_j / [C⁻¹]_jj, as a Gram matrix, and C⁻¹ of the rest."""
    row = inverse[place] / inverse[place, place]
    column = gram[:, place] - gram[place, place] / 2 * row
    gram.addr_(column, row, alpha=-1).addr_(row, column, alpha=-1)
    inverse.addr_(inverse[:, place].clone(), row, alpha=-1)
    inverse[place, place] = 1.0  # it is 0 now, and nobody is to divide by it


def stand_ins(seen: Moments, code: Tensor) -> tuple[Tensor, Tensor]:
    """How all channels are told by what is left of them: h ≈ T (code h) + rest, with the least squared error.

    Args:
        seen: What the channels look like.
        code: What is left of them, (left, channels): some of them, or mixtures.

    Returns:
        T, (channels, left), and the rest, (channels,).
    """
    code = code.to(seen.covariance)
    narrowed = code @ seen.covariance
    told = torch.linalg.solve(narrowed @ code.T, narrowed).T
    return told, seen.mean - told @ (code @ seen.mean)


def suitable_damping(rows: Tensor, learnt: Raw, judged: Raw, code: Tensor) -> float:
    """The damping with which what is left stands in best for all channels on inputs that were not learnt from.

    Args:
        rows: The reader's weights, as for `removal_order`.
        learnt: What the channels look like in inputs that stand-ins are found by.
        judged: What they look like in others.
        code: What is left of the channels, as for `stand_ins`.
    """
    errors = [unseen_error(rows, learnt.damped(damping), code, judged) for damping in DAMPINGS]
    return DAMPINGS[errors.index(min(errors))]


def unseen_error(rows: Tensor, seen: Moments, code: Tensor, judged: Raw) -> float:
    """E|W h − W (T (code h) + rest)|² over other inputs than T and the rest were found by."""
    told, rest = stand_ins(seen, code)
    apart = torch.eye(len(rest), dtype=told.dtype, device=told.device) - told @ code.to(told)
    lost, shift = rows @ apart, rows @ rest
    return float((lost @ judged.second * lost).sum() - 2 * (lost @ judged.mean) @ shift + shift @ shift)
