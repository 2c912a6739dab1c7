"""The arithmetic of one group of channels: in which order they can go, what that costs, and how the others stand in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Added to the covariance, as a part of its mean diagonal: what channels have to do with each other in a thousand
#: pictures is not all true of others. docs/imagenet.md has what it was chosen by.
DAMPING = 1e-2


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
        removed: The channels, the first to go first; the last one always stays and is not in it.
        errors: The share of the reader's output that is lost once so many of them are gone: ``errors[0]`` is 0.
    """

    removed: Sequence[int]
    errors: Sequence[float]

    def kept(self, width: int) -> list[int]:
        """The channels that are left when there are to be ``width`` of them, in their old order."""
        gone = set(self.removed[: len(self.removed) + 1 - width])
        return [channel for channel in range(len(self.removed) + 1) if channel not in gone]


def moments(mean: Tensor, second: Tensor, *, shifts: bool, damping: float = DAMPING) -> Moments:
    """From E[h] and E[h hᵀ]; about zero, where nothing behind the reader could take a shift."""
    mean = mean if shifts else torch.zeros_like(mean)
    covariance = second - torch.outer(mean, mean)
    covariance = (covariance + covariance.T) / 2
    level = covariance.diagonal().mean()
    added = damping * level if bool(level > 0) else torch.ones_like(level)
    return Moments(mean, covariance + added * torch.eye(len(mean), dtype=mean.dtype, device=mean.device))


def removal_order(rows: Tensor, seen: Moments) -> Order:
    """Takes channels away one by one, always the one whose going costs least once all others have made up for it.

    For a reader W the least squared error of W h without channel j is |w_j|² / [C⁻¹]_jj, with C the covariance of h;
    the weights of the others that reach it, and the inverse for the next round, follow by one step of elimination
    (optimal brain surgeon, for columns).

    Args:
        rows: The reader's weights, (outputs, channels); every tap of a convolution makes rows of its own.
        seen: What the channels look like.
    """
    width = rows.shape[1]
    # The Gram matrix tells all that is needed of the weights, and is smaller where a reader has many rows.
    gram, inverse = rows.T @ rows, torch.linalg.inv(seen.covariance)
    whole = float((gram * seen.covariance).sum())
    names, there = list(range(width)), torch.ones(width, dtype=torch.bool, device=rows.device)
    removed, errors, lost = [], [0.0], 0.0
    for _ in range(width - 1):
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
    return Order(removed, errors)


def _eliminate(place: int, gram: Tensor, inverse: Tensor) -> None:
    """One step, in place: W ← W − w_j [C⁻¹]_j / [C⁻¹]_jj, as a Gram matrix, and C⁻¹ of the rest."""
    row = inverse[place] / inverse[place, place]
    column = gram[:, place] - gram[place, place] / 2 * row
    gram.addr_(column, row, alpha=-1).addr_(row, column, alpha=-1)
    inverse.addr_(inverse[:, place].clone(), row, alpha=-1)
    inverse[place, place] = 1.0  # it is 0 now, and nobody is to divide by it


def stand_ins(seen: Moments, kept: Sequence[int]) -> tuple[Tensor, Tensor]:
    """How all channels are told by those that stay: h ≈ T h_kept + rest, with the least squared error.

    Returns:
        T, (channels, kept), and the rest, (channels,).
    """
    index = torch.tensor(kept, device=seen.mean.device)
    among = seen.covariance[index][:, index]
    told = torch.linalg.solve(among, seen.covariance[index]).T
    return told, seen.mean - told @ seen.mean[index]
