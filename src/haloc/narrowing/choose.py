"""How many channels stay where: what is lost least goes first, until the network is as small as it is to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from haloc.errors import BudgetError
from haloc.inventory import Inventory
from haloc.narrowing.hidden import Channels, Sizes, offered_widths
from haloc.narrowing.latency import WidthCost

#: What a network costs with certain widths, by quantity.
Costs = Callable[[Mapping[str, int]], dict[str, float]]


def choose_widths(
    layers: Inventory,
    hidden: Sequence[Channels],
    losses: Mapping[str, Sequence[float]],
    limits: Mapping[str, float],
    round_to: int,
    cost: WidthCost | None = None,
) -> dict[str, int]:
    """Narrows step by step, each time where the loss per saving is least. No torch here.

    Channels of a chain, as in VGG, share layers, so what a step saves depends on the steps before it; it is counted
    anew where these were next to it. Losses are taken to add up, and so are the costs of layers. Latency comes in
    stairs, so a step may be of any size: of several that save the same, the smallest. Small steps alone are tried too,
    since a large one takes more than it has to here and there; what loses less counts.

    Args:
        layers: The dense network.
        hidden: What can be narrowed.
        losses: For each, by its name, what is lost when so many channels are gone.
        limits: What is to remain at most: "macs", "params", and "latency" in the unit of the cost.
        round_to: Widths are multiples of this, or what they were.
        cost: What latency is counted by.

    Returns:
        The width of each, by its name.
    """
    descent = _Descent(
        costs=_costs(Sizes(layers, hidden), cost),
        limits=limits,
        offered={group.consumer: offered_widths(group.width, round_to) for group in hidden},
        losses=losses,
        beside=_beside(hidden),
    )
    ends = [descent.walked(far) for far in (False, True)]
    reached = [descent.given_back(widths) for widths in ends if descent.holds(widths)]
    if not reached:
        raise _unreachable(descent.costs(ends[-1]), limits, descent.costs({}))
    return min(reached, key=descent.loss)


def _costs(sizes: Sizes, cost: WidthCost | None) -> Costs:
    if cost is None:
        return lambda widths: dict(sizes.counts(widths))
    return lambda widths: {**sizes.counts(widths), "latency": cost.of(widths).value}


def _beside(hidden: Sequence[Channels]) -> dict[str, set[str]]:
    """For every group those that share a layer with it, itself among them: what its steps save depends on these."""
    layers = {group.consumer: {*group.makers, *group.carriers, *group.readers} for group in hidden}
    return {name: {other for other in layers if layers[name] & layers[other]} for name in layers}


@dataclass(frozen=True)
class _Descent:
    """The way from the whole network down to one within the limits.

    Attributes:
        costs: What networks cost.
        limits: What they may.
        offered: The widths of every group, the whole one first.
        losses: What is lost with so many channels gone.
        beside: For every group those whose savings change when it does.
    """

    costs: Costs
    limits: Mapping[str, float]
    offered: Mapping[str, tuple[int, ...]]
    losses: Mapping[str, Sequence[float]]
    beside: Mapping[str, set[str]]

    def holds(self, widths: Mapping[str, int]) -> bool:
        """Whether a network keeps to all limits."""
        found = self.costs(widths)
        return all(found[name] <= limit for name, limit in self.limits.items())

    def loss(self, widths: Mapping[str, int]) -> float:
        """What is lost in all."""
        return sum(self._lost(name, width) for name, width in widths.items())

    def _lost(self, name: str, width: int) -> float:
        return self.losses[name][self.offered[name][0] - width]

    def walked(self, far: bool) -> dict[str, int]:
        """Steps down until the limits hold or nothing saves any more; to the next width only, or as far as it pays."""
        widths = {name: offered[0] for name, offered in self.offered.items()}
        found, savings = self.costs(widths), dict[str, list[tuple[int, dict[str, float]]]]()
        while over := {name: found[name] - limit for name, limit in self.limits.items() if found[name] > limit}:
            for name in widths.keys() - savings.keys():
                savings[name] = self._savings(name, widths, found, far)
            steps = (step for name in widths for step in self._steps(name, widths, savings[name], over, far))
            best = min(steps, key=lambda step: step[0], default=None)
            if best is None:
                break
            _, name, width = best
            widths[name] = width
            found = self.costs(widths)
            for other in self.beside[name]:
                del savings[other]
        return widths

    def _savings(
        self, name: str, widths: Mapping[str, int], found: Mapping[str, float], far: bool
    ) -> list[tuple[int, dict[str, float]]]:
        """For every smaller width of a group what it would save."""
        smaller = [width for width in self.offered[name] if width < widths[name]][: None if far else 1]
        costs = {width: self.costs({**widths, name: width}) for width in smaller}
        return [(width, {each: found[each] - cost[each] for each in self.limits}) for width, cost in costs.items()]

    def _steps(
        self,
        name: str,
        widths: Mapping[str, int],
        savings: Sequence[tuple[int, Mapping[str, float]]],
        over: Mapping[str, float],
        far: bool,
    ) -> Iterator[tuple[float, str, int]]:
        """The loss per saving of every step of a group that saves something; a far one gets no credit for too much."""
        before = self._lost(name, widths[name])
        for width, saving in savings:
            parts = [saving[each] / missing for each, missing in over.items()]
            saved = sum(min(1.0, part) for part in parts) if far else sum(parts)
            if saved > 0:
                yield (self._lost(name, width) - before) / saved, name, width

    def given_back(self, widths: Mapping[str, int]) -> dict[str, int]:
        """Channels that need not have gone come back, the most missed ones first, as long as the limits hold."""
        found = dict(widths)
        while True:
            gains = [
                (self._lost(name, width) - self._lost(name, wider), name, wider)
                for name, width in found.items()
                for wider in self.offered[name]
                if wider > width
            ]
            better = ({**found, name: wider} for gain, name, wider in sorted(gains, reverse=True) if gain > 0)
            back = next(filter(self.holds, better), None)
            if back is None:
                return found
            found = back


def filled_in(errors: Sequence[float], tried: Mapping[int, float]) -> list[float]:
    """Losses for every number of channels that are gone, from those of a few that were tried.

    Between two of them, and beyond the last, a loss grows as a group's own errors do. It never falls.

    Args:
        errors: The group's own errors, for 0, 1, 2, … channels gone.
        tried: What the network lost with so many gone.
    """
    points = [(0, 0.0)]
    for gone, loss in sorted(tried.items()):
        points.append((gone, max(loss, points[-1][1])))
    found = [0.0] * len(errors)
    slope = 0.0
    for (start, low), (end, high) in zip(points, [*points[1:], (len(errors) - 1, inf)], strict=True):
        rise = errors[end] - errors[start]
        if high < inf:
            slope = (high - low) / rise if rise > 0 else 0.0
        for gone in range(start, end + 1):
            found[gone] = low + slope * (errors[gone] - errors[start])
    return found


def _unreachable(found: Mapping[str, float], limits: Mapping[str, float], whole: Mapping[str, float]) -> BudgetError:
    def said(name: str, value: float) -> str:
        amount = f" ({value:.3g} ms)" if name == "latency" else ""
        return f"{value / whole[name]:.1%} of the {name}{amount}"

    wanted = " and ".join(said(name, limit) for name, limit in limits.items())
    reach = " and ".join(said(name, found[name]) for name in limits)
    return BudgetError(
        f"narrowing alone cannot reach {wanted}: with the fewest channels everywhere {reach} remain; ask for less, and "
        "let ranks do the rest",
        {name: float(count) for name, count in found.items()},
    )
