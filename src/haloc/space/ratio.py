"""Algorithm 1 of the paper: the ranks around those that leave a given share of the parameters.

The paper's compression ratio α is how many times smaller the network gets; ours is what remains, 1/α. Its ranks are
those of one group here, and its C and F the channels of one group.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor, prod, sqrt

from haloc.forms import FORMS, SCALINGS, families, full_ranks, params
from haloc.shapes import ConvShape, Shape

#: Algorithm 1's steps for 16, 32, 64, 128, 256 and 512 channels; wider layers take the last.
STEPS = (4, 8, 16, 16, 32, 32)

#: By how much Algorithm 1 relaxes the reduction of the ranks to either side.
SLACK = 2

#: A bound that a multiple of the step misses by no more than rounding still includes it.
ROUNDING = 1e-9


def widths(shape: Shape) -> tuple[int, ...]:
    """The ranks of a layer's channels: what its width is measured by, in whichever form it is written."""
    return full_ranks(shape, families(shape)[0])


def paper_step(shape: Shape, widest: int) -> int:
    """Algorithm 1's step: 4 throughout in networks narrower than 128 channels, otherwise by the layer's width."""
    if widest < 128:
        return STEPS[0]
    # The paper indexes its list with t/16 − 1; the list itself is in powers of two.
    doublings = (min(widths(shape)) // 16).bit_length() - 1
    return STEPS[min(max(doublings, 0), len(STEPS) - 1)]


def rank_reduction(shape: ConvShape, alpha: float) -> float:
    """α_rank of Eq. (r_comp): ranks F/α_rank and C/α_rank leave 1/``alpha`` of a convolution's weights in Tucker-2.

    It solves F·C·K1·K2/α = (C² + F²)/α_rank + F·C·K1·K2/α_rank², whose last term the paper misprints. This is its
    closed form with the fraction expanded, so that the root and C² + F² are added: their difference loses digits.
    """
    squares = shape.group_in**2 + shape.group_out**2
    weights = shape.group_in * shape.group_out * prod(shape.kernel)
    return alpha * (sqrt(squares**2 + 4 * weights**2 / alpha) + squares) / (2 * weights)


def line_reduction(shape: Shape, scaling: str, alpha: float) -> float:
    """What α_rank is for a form of which one rank moves: its weights are that rank times those at rank 1."""
    family, shrinks = SCALINGS[scaling]
    bare = replace(shape, bias=False)
    fulls = full_ranks(shape, family)
    least = FORMS[family](*along(fulls, shrinks, 1))
    (full,) = (full for full, shrink in zip(fulls, shrinks, strict=True) if shrink)
    return alpha * full * params(bare, least) / bare.params


def rank_range(full: int, reduction: float) -> tuple[float, float]:
    """Algorithm 1's range [t/(α_rank + 2), t/(α_rank − 2)], kept within 1 and the full rank t.

    As printed its upper end lies beyond t where α_rank is below 3, and below zero where it is below 2.
    """
    low = full / (reduction + SLACK)
    high = full / (reduction - SLACK) if reduction > SLACK else full
    return min(max(low, 1.0), full), min(max(high, 1.0), full)


def ranks_within(low: float, high: float, full: int, step: int) -> tuple[int, ...]:
    """The multiples of ``step`` from ``low`` to ``high``; where there is none, the nearest to either side.

    Never more than ``full``, and ``full`` itself where that is less than one step, so there is always one.
    """
    inside = range(ceil(low / step - ROUNDING) * step, floor(high + ROUNDING) + 1, step)
    below = floor(low / step) * step
    nearest = [rank for rank in (below, below + step) if step <= rank <= full]
    return tuple(inside) or tuple(nearest) or (full,)


def ratio_settings(shape: Shape, scaling: str, ratio: float, step: int) -> list[tuple[int, ...]]:
    """The settings of Algorithm 1 for one layer, of which about ``ratio`` of the parameters are to remain.

    Two-sided Tucker-2 has for every rank r the pair (r, r) and the pair that is scaled with the channels. For the other
    forms, which the paper does not treat, the one rank that moves is reduced and relaxed in the same way.
    """
    family, shrinks = SCALINGS[scaling]
    fulls = full_ranks(shape, family)
    if isinstance(shape, ConvShape) and scaling == "tucker2":
        found = ranks_within(*rank_range(min(fulls), rank_reduction(shape, 1 / ratio)), min(fulls), step)
        return sorted({pair for rank in found for pair in _pairs(fulls, rank, step)})
    (full,) = (full for full, shrink in zip(fulls, shrinks, strict=True) if shrink)
    found = ranks_within(*rank_range(full, line_reduction(shape, scaling, 1 / ratio)), full, step)
    return [along(fulls, shrinks, rank) for rank in found]


def along(fulls: tuple[int, ...], shrinks: tuple[bool, ...], rank: int) -> tuple[int, ...]:
    """The setting with ``rank`` in the modes that shrink; the others stay full."""
    return tuple(rank if shrink else full for full, shrink in zip(fulls, shrinks, strict=True))


def _pairs(fulls: tuple[int, ...], rank: int, step: int) -> list[tuple[int, ...]]:
    """(r, r), and r on the smaller mode with r·m on the larger, which is m times as large.

    The paper prints the second pair the wrong way round; its comment says what is meant. Where r·m is not a multiple of
    the step it goes to the nearest, for that is what the hardware feels (Design Principle 1).
    """
    small, large = min(fulls), max(fulls)
    scaled = large if rank == small else max(rank, round(rank * large / small / step) * step)
    # Rounding up may go beyond the mode, though r·m never does.
    scaled -= step if scaled > large else 0
    return [(rank, rank), tuple(scaled if full > small else rank for full in fulls)]
