"""How the two ranks of a Tucker-2 layer should differ: its error at one number of weights (the paper's Fig. 3)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from haloc.errors import SpecError
from haloc.factor.layers import Conv, conv_shape
from haloc.factor.modules import Factoriser
from haloc.forms import Tucker2, families, params
from haloc.shapes import ConvShape


@dataclass(frozen=True)
class Discrepancy:
    """One setting of the two ranks.

    Attributes:
        form: The ranks.
        weights: How many weights the layer has with them.
        error: The relative error of its weight.
    """

    form: Tucker2
    weights: int
    error: float

    @property
    def difference(self) -> int:
        """The paper's ΔRank, r(1) − r(2)."""
        return self.form.rank_out - self.form.rank_in


def discrepancies(layer: Conv, weights: int) -> tuple[Discrepancy, ...]:
    """The error of every setting of Tucker-2 that takes about ``weights`` weights, by rising `Discrepancy.difference`.

    Args:
        layer: The dense convolution; it is read, never changed.
        weights: How many weights, without bias, the settings may have at most; see `settings_at`.
    """
    factoriser, shape = Factoriser(layer), conv_shape(layer)
    forms = settings_at(shape, weights)
    return tuple(Discrepancy(form, _weights(shape, form), factoriser.error(form)) for form in forms)


def settings_at(shape: ConvShape, weights: int) -> tuple[Tucker2, ...]:
    """For every rank_out the largest rank_in with which the layer has at most ``weights`` weights.

    They are counted as built, so a rank that is full takes no 1×1. Where rank_in is full and a larger rank_out could
    still be paid for, the setting is left out: it is not one of this number of weights.
    """
    if Tucker2.name not in families(shape):
        raise SpecError(f"Tucker-2 is for kernels larger than 1×1, got a kernel of {shape.kernel}")
    found = {rank_out: _largest_rank_in(shape, rank_out, weights) for rank_out in range(1, shape.group_out + 1)}
    spent = (
        Tucker2(rank_out, rank_in)
        for rank_out, rank_in in found.items()
        if rank_in and not rank_in == found.get(rank_out + 1) == shape.group_in
    )
    forms = tuple(sorted(spent, key=lambda form: form.rank_out - form.rank_in))
    if not forms:
        raise SpecError(f"{weights} weights are too few: ranks of 1 take {_weights(shape, Tucker2(1, 1))}")
    return forms


def tucker_weights(shape: ConvShape, rank_out: float, rank_in: float) -> float:
    """n_tucker = F·r(1) + C·r(2) + r(1)·r(2)·K1·K2 of the paper's appendix, summed over the groups.

    Ranks need not be whole. Below full rank this is what `haloc.forms.params` counts for a layer without bias.
    """
    core = rank_out * rank_in * prod(shape.kernel)
    return shape.groups * (shape.group_out * rank_out + shape.group_in * rank_in + core)


def kept_share(out_values: Sequence[float], in_values: Sequence[float], rank_out: int, rank_in: int) -> float:
    """ρ of Eq. (pca_ratio): the share of the singular values that is kept, one mode times the other.

    Args:
        out_values: All singular values of the unfolding along the output channels, largest first.
        in_values: The same along the input channels.
        rank_out: How many of the former are kept.
        rank_in: How many of the latter are kept.
    """
    return sum(out_values[:rank_out]) / sum(out_values) * (sum(in_values[:rank_in]) / sum(in_values))


def _largest_rank_in(shape: ConvShape, rank_out: int, weights: int) -> int:
    """The largest rank_in that ``weights`` weights can pay for beside ``rank_out``; 0 if there is none."""
    # A full rank comes first: it may cost less than the one below, as its 1×1 falls away.
    if _weights(shape, Tucker2(rank_out, shape.group_in)) <= weights:
        return shape.group_in
    below = range(1, shape.group_in)
    return bisect_right(below, weights, key=lambda rank_in: _weights(shape, Tucker2(rank_out, rank_in)))


def _weights(shape: ConvShape, form: Tucker2) -> int:
    return params(replace(shape, bias=False), form)
