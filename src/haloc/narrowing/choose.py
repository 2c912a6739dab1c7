"""How many channels stay where: what is lost least goes first, until the network is as small as it is to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from haloc.errors import BudgetError
from haloc.inventory import Inventory
from haloc.narrowing.hidden import Hidden, Sizes


def choose_widths(
    layers: Inventory,
    hidden: Sequence[Hidden],
    losses: Mapping[str, Sequence[float]],
    limits: Mapping[str, float],
    round_to: int,
) -> dict[str, int]:
    """Narrows step by step, each time where the loss per saving is least. No torch here.

    Channels of a chain, as in VGG, share layers, so what a step saves depends on the steps before it; it is counted
    anew for every one. Losses are taken to add up.

    Args:
        layers: The dense network.
        hidden: What can be narrowed.
        losses: For each, by its name, what is lost when so many channels are gone.
        limits: What is to remain at most, "macs" and "params".
        round_to: Widths are multiples of this, or what they were.

    Returns:
        The width of each, by its name.
    """
    widths = {group.consumer: group.width for group in hidden}
    whole = {group.consumer: group.width for group in hidden}
    sizes = Sizes(layers, hidden)
    found = sizes.counts(widths)
    while over := {name: limit for name, limit in limits.items() if found[name] > limit}:
        best: tuple[float, str, int, dict[str, int]] | None = None
        for name, width in widths.items():
            smaller = _next(width, round_to)
            if smaller is None:
                continue
            then = sizes.counts({**widths, name: smaller})
            saved = sum((found[each] - then[each]) / (found[each] - limit) for each, limit in over.items())
            lost = losses[name][whole[name] - smaller] - losses[name][whole[name] - width]
            rate = lost / saved if saved > 0 else inf
            if best is None or rate < best[0]:
                best = (rate, name, smaller, then)
        if best is None or best[0] == inf:
            raise _unreachable(found, limits, sizes.counts({}))
        _, name, smaller, found = best
        widths[name] = smaller
    return widths


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


def _next(width: int, round_to: int) -> int | None:
    """The next smaller width, if there is one."""
    smaller = (width - 1) // round_to * round_to
    return smaller if smaller >= 1 else None


def _unreachable(found: Mapping[str, int], limits: Mapping[str, float], whole: Mapping[str, int]) -> BudgetError:
    reach = {name: found[name] / whole[name] for name in limits}
    said = " and ".join(f"{share:.1%} of the {name}" for name, share in reach.items())
    wanted = " and ".join(f"{limit / whole[name]:.1%} of the {name}" for name, limit in limits.items())
    return BudgetError(
        f"narrowing alone cannot reach {wanted}: with the fewest channels everywhere {said} remain; ask for less, and "
        "let ranks do the rest",
        {name: float(count) for name, count in found.items()},
    )
