"""Networks within limits as rows of numbers, the place of every layer on its ladder: drawn, crossed, mutated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from haloc.methods.budget import Limit
from haloc.methods.solve import least_sum
from haloc.plan import Plan

#: A place on the ladder of every layer.
Genes = tuple[int, ...]

#: How far a layer moves at most when it mutates, as a share of its ladder.
REACH = 0.125


@dataclass(frozen=True, eq=False)
class Ladders:
    """The candidates worth having of every layer, each with those that take less of the budgets below it.

    Attributes:
        limits: What a network may cost.
        rungs: For every layer the numbers of its candidates in the space, in the order of their cost.
    """

    limits: tuple[Limit, ...]
    rungs: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, limits: tuple[Limit, ...], errors: Mapping[str, Sequence[float]]) -> Ladders:
        """Leaves out candidates that cost as much as another one of their layer, or more, and are no better.

        Args:
            limits: What a network may cost.
            errors: Of every candidate of every layer, on its own.
        """
        rungs = []
        for name, row in errors.items():
            costs = np.array([limit.prices.prices[name] for limit in limits]).T
            shares = (costs / [limit.budget for limit in limits]).sum(1)
            order = sorted(range(len(row)), key=lambda number: (shares[number], row[number]))
            rungs.append(tuple(number for number in order if not _beaten(number, costs, row)))
        return cls(limits, tuple(rungs))

    def plan(self, genes: Genes) -> Plan:
        """The network that the genes mean."""
        rows = zip(self.limits[0].prices.forms.items(), self.rungs, genes, strict=True)
        return Plan({name: forms[rungs[place]] for (name, forms), rungs, place in rows})

    def fits(self, genes: Sequence[int]) -> bool:
        """Whether the network keeps to all limits; added up as `PriceList.cost_of` does, so to the last bit."""
        chosen = [rungs[place] for rungs, place in zip(self.rungs, genes, strict=True)]
        return all(limit.prices.rest + sum(_taken(limit, chosen)) <= limit.budget for limit in self.limits)

    def drawn(self, draw: np.random.Generator) -> Genes:
        """A network at random within the limits."""
        return self.repaired([int(draw.integers(len(rungs))) for rungs in self.rungs], draw)

    def child(self, one: Genes, other: Genes, mutation: float, draw: np.random.Generator) -> Genes:
        """Takes every layer from one of two parents, lets some of them move a little, and sees to the limits."""
        genes = [a if draw.random() < 0.5 else b for a, b in zip(one, other, strict=True)]
        for layer, rungs in enumerate(self.rungs):
            if draw.random() < mutation:
                reach = max(1, round(REACH * len(rungs)))
                moved = genes[layer] + int(draw.integers(1, reach + 1)) * int(draw.choice((-1, 1)))
                genes[layer] = min(max(moved, 0), len(rungs) - 1)
        return self.repaired(genes, draw)

    def repaired(self, genes: list[int], draw: np.random.Generator) -> Genes:
        """Random layers step down until the network keeps to all limits, then random layers step up while it does."""
        genes = list(genes)
        while not self.fits(genes):
            high = [layer for layer, place in enumerate(genes) if place > 0]
            if not high:
                # With several limits the lowest rungs need not fit: they are lowest in the sum of what they take.
                genes = self._nearest(genes)
                break
            genes[int(draw.choice(high))] -= 1
        low = [layer for layer, rungs in enumerate(self.rungs) if genes[layer] < len(rungs) - 1]
        while low:
            layer = int(draw.choice(low))
            genes[layer] += 1
            if not self.fits(genes):
                genes[layer] -= 1
                low.remove(layer)
            elif genes[layer] == len(self.rungs[layer]) - 1:
                low.remove(layer)
        return tuple(genes)

    def _nearest(self, genes: Sequence[int]) -> list[int]:
        """The network within the limits whose places on the ladders are nearest in sum."""
        losses = {}
        forms = self.limits[0].prices.forms
        for (name, row), rungs, own in zip(forms.items(), self.rungs, genes, strict=True):
            far = {number: float(abs(place - own)) for place, number in enumerate(rungs)}
            losses[name] = [far.get(number, np.inf) for number in range(len(row))]
        plan = least_sum(losses, self.limits)
        return [rungs.index(forms[name].index(plan[name])) for name, rungs in zip(forms, self.rungs, strict=True)]


def _taken(limit: Limit, chosen: Sequence[int]) -> list[float]:
    return [row[number] for row, number in zip(limit.prices.prices.values(), chosen, strict=True)]


def _beaten(number: int, costs: NDArray[np.float64], errors: Sequence[float]) -> bool:
    """Whether another candidate costs no more by any limit and errs no more; the first of several alike stays."""
    for other in range(len(errors)):
        no_worse = bool((costs[other] <= costs[number]).all()) and errors[other] <= errors[number]
        alike = bool((costs[other] == costs[number]).all()) and errors[other] == errors[number]
        if no_worse and (not alike or other < number):
            return True
    return False
