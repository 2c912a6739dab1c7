"""Budgets: what a user asks for, and what that means for a space."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from haloc.cost.count import COUNTS, Count
from haloc.cost.model import CostModel
from haloc.cost.network import NetworkCost
from haloc.errors import SpecError, nearest
from haloc.forms import Dense, Form, ranks
from haloc.methods.prices import PriceList
from haloc.space import Grid, LayerChoices, RankSpace

#: A budget, or several by the names of their costs.
Budget = float | str | Mapping[str, float | str]
#: A cost model, or several by name; counts need not be given.
Costs = CostModel | NetworkCost | Mapping[str, CostModel | NetworkCost] | None

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(%|[a-zµ]*)\s*", re.IGNORECASE)
_LARGE = {"k": 1e3, "m": 1e6, "g": 1e9}


@dataclass(frozen=True)
class Limit:
    """A budget and the prices that it is held against.

    Attributes:
        prices: What every candidate costs.
        budget: The paper's ε: what the whole network may cost, in the unit of the prices.
    """

    prices: PriceList
    budget: float

    def holds(self, plan: Mapping[str, Form]) -> bool:
        """Whether a network keeps to it."""
        return self.prices.cost_of(plan) <= self.budget


@dataclass(frozen=True)
class Spending:
    """What a network costs beside what it may: one line of a result.

    Attributes:
        quantity: What is counted or measured, or the name that its budget was given.
        unit: Its unit; empty for plain counts.
        cost: What the network costs.
        budget: What it may cost.
        dense: What the uncompressed network costs.
    """

    quantity: str
    unit: str
    cost: float
    budget: float
    dense: float

    @property
    def remains(self) -> float:
        """The share of the uncompressed network's cost that remains."""
        return self.cost / self.dense


def limits_of(space: RankSpace, budget: Budget, cost: Costs = None) -> tuple[Limit, ...]:
    """The limits that a user's budgets mean for a space.

    Args:
        space: What the layers may become.
        budget: ``"60%"`` or 0.6 of the uncompressed network's cost, ``"4 ms"`` or 4.0 in the unit of the cost,
            ``"12M"`` for counts; or several by name, as in ``{"macs": "28%", "params": "24%", "latency": "4 ms"}``.
        cost: What is budgeted: a table, a predictor, a network's cost or a count; multiply-adds unless told otherwise.
            With several budgets a mapping by their names; macs, params and other counts need not be in it.
    """
    models = _models(budget, cost)
    wanted = budget if isinstance(budget, Mapping) else dict.fromkeys(models, budget)
    # By the user's names: two targets' latencies are to be told apart.
    lists = {name: replace(PriceList.of(space, model), quantity=name) for name, model in models.items()}
    return tuple(Limit(prices, amount(wanted[name], prices)) for name, prices in lists.items())


def affordable(space: RankSpace, limits: Sequence[Limit]) -> RankSpace:
    """The space without what no network within the limits can have, were all other layers as cheap as can be."""
    kept = {name: set(offer) for name, offer in space.open_layers.items()}
    for limit in limits:
        room = limit.budget - limit.prices.cheapest
        for name, prices in limit.prices.prices.items():
            dear = min(prices) + max(room, 0.0)
            kept[name] -= {f for f, price in zip(limit.prices.forms[name], prices, strict=True) if price > dear}
    layers = {name: _narrowed(offer, kept.get(name)) for name, offer in space.layers.items()}
    return replace(space, layers=layers)


def _narrowed(offer: LayerChoices, kept: set[Form] | None) -> LayerChoices:
    """What is left of a layer's choices; a layer without any other choice than dense stays what it is."""
    if kept is None:
        return offer
    grids = (Grid.of(grid.family, (ranks(form) for form in grid if form in kept)) for grid in offer.grids)
    return LayerChoices(offer.calls, tuple(grid for grid in grids if len(grid)), Dense() in kept)


def amount(wanted: Any, prices: PriceList) -> float:
    """A budget in the unit of the prices; percentages and bare numbers up to 1 are shares of the dense cost."""
    number, unit = _parsed(wanted)
    if unit == "%":
        return number * prices.dense / 100  # in this order 29% of 100 is 29, not a rounding below
    if is_share(wanted):
        return number * prices.dense
    return number * _factor(wanted, unit, prices)


def share_or_amount(wanted: Any, quantity: str, dense: float, unit: str = "") -> float:
    """A budget as a number, given what the uncompressed network has of it; a count, where there is no unit."""
    return amount(wanted, PriceList(quantity, unit, {}, {}, dense, dense))


def is_share(wanted: Any) -> bool:
    """Whether a budget is a share of the uncompressed network's cost, not an amount."""
    number, unit = _parsed(wanted)
    return unit == "%" or (unit == "" and number <= 1)


def spending(limits: tuple[Limit, ...], plan: Mapping[str, Form]) -> tuple[Spending, ...]:
    """What a network costs beside its budgets."""
    rows = ((limit.prices, limit.budget) for limit in limits)
    return tuple(Spending(p.quantity, p.unit, p.cost_of(plan), budget, p.dense) for p, budget in rows)


def _models(budget: Budget, cost: Costs) -> dict[str, CostModel | NetworkCost]:
    """The cost model of every budget, by name."""
    if not isinstance(budget, Mapping):
        if isinstance(cost, Mapping):
            raise SpecError(
                f"one budget and costs of {', '.join(cost)}: say which one is meant, as in {{name: budget}}"
            )
        model = Count("macs") if cost is None else cost
        return {_quantity(model): model}
    if not budget:
        raise SpecError("there is no budget; give one such as '60%', or several by name, as in {'macs': '30%'}")
    given = dict(cost) if isinstance(cost, Mapping) else {} if cost is None else {_quantity(cost): cost}
    models = {name: given[name] if name in given else _counted(name, given) for name in budget}
    if not isinstance(cost, Mapping | Count | None) and _quantity(cost) not in budget:
        raise SpecError(f"there is a cost of {_quantity(cost)} and no budget for it, only for {', '.join(budget)}")
    return models


def _counted(name: str, given: Mapping[str, Any]) -> Count:
    if name in COUNTS:
        return Count(name)
    known = [*COUNTS, *given]
    raise SpecError(f"there is no cost for the budget of {name!r}, known are {', '.join(known)}.{nearest(name, known)}")


def _quantity(model: CostModel | NetworkCost) -> str:
    return "latency" if isinstance(model, NetworkCost) else model.quantity


def _parsed(wanted: Any) -> tuple[float, str]:
    match = _NUMBER.fullmatch(wanted) if isinstance(wanted, str) else None
    if match is not None:
        number, unit = float(match[1]), match[2]
    elif isinstance(wanted, Real) and not isinstance(wanted, bool):
        number, unit = float(wanted), ""
    else:
        raise SpecError(f"a budget is a share such as '60%', or an amount such as '4 ms' or '12M', got {wanted!r}")
    if not 0 < number < float("inf"):
        raise SpecError(f"a budget must be above 0, got {wanted!r}")
    return number, unit


def _factor(wanted: Any, unit: str, prices: PriceList) -> float:
    """What a number with that unit is to be multiplied with."""
    if unit in ("", prices.unit):
        return 1.0
    counted = prices.unit in ("", "B")
    prefix = unit.removesuffix(prices.unit).lower()
    if counted and prefix in _LARGE:
        return _LARGE[prefix]
    of = f"{prices.quantity} is a count, such as '12M'" if counted else f"{prices.quantity} is in {prices.unit}"
    raise SpecError(f"a budget of {wanted!r} cannot be, {of}; or give a share such as '60%'")
