"""The steps that latency climbs as ranks grow: of all ranks that were measured, those that are worth having."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from haloc.errors import CostError, SpecError
from haloc.forms import SCALINGS, Dense, Form, full_ranks, ranks
from haloc.inventory import LayerInfo
from haloc.shapes import Shape
from haloc.space.grids import Grid

#: By how much a lower rank has to be cheaper before it counts as another step of the staircase.
TOLERANCE = 0.03


class Price(Protocol):
    """A number with a unit of its own; `haloc.cost` has them with an error."""

    @property
    def value(self) -> float:
        """The number."""


class Prices(Protocol):
    """A cost model that can say which forms it has prices for, such as a measured table."""

    def forms_of(self, shape: Shape) -> Iterable[Form]:
        """The forms of a layer that have a price."""

    def price(self, shape: Shape, form: Form) -> Price:
        """What a layer costs in a form."""


def staircase(prices: Mapping[int, float], dense: float, tolerance: float = TOLERANCE) -> tuple[int, ...]:
    """The ranks at the edges of the steps that latency climbs as the rank grows, in rising order.

    Walks from dense over the largest rank down. A rank is kept where it is cheaper than what was kept last by more
    than ``tolerance`` (0.03: 3% of its own price); otherwise the larger rank does better for no more. So every rank
    kept is cheaper than dense, and there may be none.
    """
    kept = edges({(rank,): price for rank, price in prices.items()}, dense, tolerance)
    return tuple(rank for (rank,) in kept)


def edges(
    prices: Mapping[tuple[int, ...], float], dense: float, tolerance: float = TOLERANCE
) -> tuple[tuple[int, ...], ...]:
    """`staircase` for settings of several ranks: none of those kept is as large as another one for no less.

    A setting is dropped where dense, or a setting kept with no rank below its own, costs no more than 1 + ``tolerance``
    times as much.
    """
    if not 0 <= tolerance < float("inf"):
        raise SpecError(f"tolerance is a share such as 0.03, not below 0; got {tolerance}")
    kept: dict[tuple[int, ...], float] = {}
    # Falling by their sum, settings come after all those that are larger in every rank.
    for setting in sorted(prices, key=lambda setting: (sum(setting), setting), reverse=True):
        limit = prices[setting] * (1 + tolerance)
        larger = (price for other, price in kept.items() if all(a >= b for a, b in zip(other, setting, strict=True)))
        if limit < dense and all(limit < price for price in larger):
            kept[setting] = prices[setting]
    return tuple(sorted(kept))


def measured_grids(
    layer: LayerInfo, scalings: Sequence[str], equal: bool, cost: Prices, tolerance: float
) -> tuple[Grid, ...]:
    """The edges of what ``cost`` has prices for, form by form; prices are sums over the layer's calls."""
    known = set.intersection(*(set(cost.forms_of(call)) for call in layer.calls))
    offered = {form for form in known if any(_offers(layer.shape, scaling, equal, form) for scaling in scalings)}
    if known != {Dense()} and not offered:
        raise CostError(
            f"there are no prices for layer {layer.name!r} as {' or '.join(scalings)}{' with equal ranks' * equal}; "
            "measure the layer on a fine grid of ranks first, or leave it out of names"
        )

    def price(form: Form) -> float:
        return sum(cost.price(call, form).value for call in layer.calls)

    dense = price(Dense())
    grids = []
    for family in dict.fromkeys(SCALINGS[scaling][0] for scaling in scalings):
        kept = edges({ranks(form): price(form) for form in offered if form.name == family}, dense, tolerance)
        grids += [Grid.of(family, kept)] if kept else []
    return tuple(grids)


def _offers(shape: Shape, scaling: str, equal: bool, form: Form) -> bool:
    """Whether ``form`` is a setting of ``scaling``: full where that does not shrink, equal ranks where they must be."""
    family, shrinks = SCALINGS[scaling]
    if form.name != family:
        return False
    own, fulls = ranks(form), full_ranks(shape, family)
    still = all(rank == full for rank, full, shrink in zip(own, fulls, shrinks, strict=True) if not shrink)
    moving = {rank for rank, shrink in zip(own, shrinks, strict=True) if shrink}
    return still and (len(moving) == 1 or not equal)
