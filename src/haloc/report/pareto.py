"""What a network loses as it gets cheaper: plans for many budgets from what one search found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from haloc.cost.model import CostModel
from haloc.cost.network import NetworkCost
from haloc.errors import BudgetError
from haloc.files import write_json
from haloc.forms import Dense, Form
from haloc.methods.evidence import Evidence
from haloc.methods.prices import PriceList
from haloc.methods.search import pareto, solve
from haloc.methods.solve import within
from haloc.plan import Plan

KIND, FORMAT = "haloc-pareto", 1


@dataclass(frozen=True)
class Point:
    """The best network within one budget.

    Attributes:
        plan: Its forms.
        budget: What it may cost.
        cost: What it costs.
        share: The share of the uncompressed network's cost that this is.
        loss: What the method expects it to lose, under its rule; numbers of different methods do not compare.
        top1: Its accuracy, where it was built and evaluated.
    """

    plan: Plan
    budget: float
    cost: float
    share: float
    loss: float
    top1: float | None = None


@dataclass(frozen=True)
class TradeOff:
    """Points from the cheapest network to the dense one.

    Attributes:
        method: Which method's losses they are.
        quantity: What is saved: macs, params, latency, ….
        unit: Its unit; empty for plain counts.
        dense: What the uncompressed network costs.
        points: By rising cost, each network once.
        top1: The accuracy of the uncompressed network, where the points have theirs.
        images: What accuracies were measured on, in words.
    """

    method: str
    quantity: str
    unit: str
    dense: float
    points: tuple[Point, ...]
    top1: float | None = None
    images: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Writes it as plain JSON values."""
        head = {"kind": KIND, "format": FORMAT, "method": self.method, "quantity": self.quantity, "unit": self.unit}
        head |= {"dense": {"cost": self.dense, "top1": self.top1}, "images": self.images}
        return head | {"points": [_row(point) for point in self.points]}

    def save(self, path: str | Path) -> None:
        """Writes it as a JSON file, whole or not at all."""
        write_json(path, self.to_dict())


def trade_off(evidence: Evidence, count: int, cost: CostModel | NetworkCost) -> TradeOff:
    """Solves for so many budgets, at equal distances from the cheapest network that the method considers to dense."""
    prices = PriceList.of(evidence.space, cost)
    low, high = _cheapest(evidence, prices, cost), prices.dense
    budgets = [_said(low + (high - low) * number / (count - 1), prices) for number in range(count)]
    points: dict[Plan, Point] = {}
    for result in pareto(evidence, budgets, cost):
        (row,) = result.spending
        loss = loss_of(evidence, result.plan)
        points.setdefault(result.plan, Point(result.plan, row.budget, row.cost, row.remains, loss))
    found = tuple(sorted(points.values(), key=lambda point: point.cost))
    return TradeOff(evidence.method, prices.quantity, prices.unit, prices.dense, found)


def loss_of(evidence: Evidence, plan: Mapping[str, Form]) -> float:
    """What a method expects a network to lose: the sum of its layers' losses, the largest, or what it has seen."""
    if evidence.rule == "seen":
        return next((loss for seen, loss in evidence.seen if seen == plan), inf)
    offers = evidence.space.open_layers
    if evidence.rule == "likeliest":
        return sum(_at_least(tuple(o), evidence.losses[n], plan.get(n, Dense())) for n, o in offers.items())
    losses = [evidence.losses[name][_index(tuple(offer), plan, name)] for name, offer in offers.items()]
    return max(losses) if evidence.rule == "largest" else sum(losses)


def _at_least(forms: Sequence[Form], losses: Sequence[float], form: Form) -> float:
    """A larger rank can do all that a smaller one can: what speaks for one speaks for it."""
    return min(loss for own, loss in zip(forms, losses, strict=True) if within(own, form))


def _index(forms: Sequence[Form], plan: Mapping[str, Form], name: str) -> int:
    return forms.index(plan.get(name, Dense()))


def _cheapest(evidence: Evidence, prices: PriceList, cost: CostModel | NetworkCost) -> float:
    """The cheapest network of the space that the method does not rule out."""
    try:
        solve(evidence, _said(prices.cheapest, prices), cost)
    except BudgetError as error:
        return error.reachable.get(prices.quantity, prices.cheapest)
    return prices.cheapest


def _said(value: float, prices: PriceList) -> str:
    """A budget in the unit of the prices: a bare number up to 1 would be taken for a share."""
    return f"{float(value)!r} {prices.unit}"


def _row(point: Point) -> dict[str, Any]:
    loss = None if point.loss == inf else point.loss  # JSON has no infinity
    found: dict[str, Any] = {"budget": point.budget, "cost": point.cost, "share": point.share, "loss": loss}
    return found | {"top1": point.top1, "plan": point.plan.to_dict()}
