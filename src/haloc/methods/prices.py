"""What every network of a space costs: a price for each candidate of each layer, and the rest that never changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from haloc.cost.model import CostModel
from haloc.cost.network import NetworkCost
from haloc.errors import PlanError
from haloc.forms import Dense, Form
from haloc.space import LayerChoices, RankSpace


@dataclass(frozen=True)
class PriceList:
    """The paper's M for a whole space, in the unit of the cost model it comes from.

    Attributes:
        quantity: What is priced: latency, energy, macs, params, …, or what its user calls it.
        unit: The unit, such as ms; empty for plain counts.
        forms: The candidates of every open layer, in the order of the space.
        prices: What each of them costs, over all calls of the layer.
        rest: What does not depend on the choices.
        dense: What the network costs as it is.
    """

    quantity: str
    unit: str
    forms: Mapping[str, tuple[Form, ...]]
    prices: Mapping[str, tuple[float, ...]]
    rest: float
    dense: float

    @classmethod
    def of(cls, space: RankSpace, cost: CostModel | NetworkCost) -> PriceList:
        """Asks for all prices; what has none raises a `CostError`."""
        forms = {name: tuple(offer) for name, offer in space.open_layers.items()}
        if isinstance(cost, NetworkCost):
            return _of_network(forms, cost)
        prices = {name: tuple(_price(space.layers[name], form, cost) for form in forms[name]) for name in forms}
        dense = {name: _price(offer, Dense(), cost) for name, offer in space.layers.items()}
        outside = space.outside.get(cost.quantity, 0)
        rest = outside + sum(price for name, price in dense.items() if name not in forms)
        return cls(cost.quantity, cost.unit, forms, prices, rest, outside + sum(dense.values()))

    @property
    def cheapest(self) -> float:
        """The cost of the cheapest network of the space."""
        return self.rest + sum(map(min, self.prices.values()))

    def cost_of(self, plan: Mapping[str, Form]) -> float:
        """The cost of a network of the space; layers that the plan does not name are dense."""
        return self.rest + sum(self._price_of(name, plan.get(name, Dense())) for name in self.forms)

    def _price_of(self, name: str, form: Form) -> float:
        if form not in self.forms[name]:
            raise PlanError(f"layer {name!r} has no candidate {form}; the plan is not of this space")
        return self.prices[name][self.forms[name].index(form)]


def _price(offer: LayerChoices, form: Form, cost: CostModel) -> float:
    """Over all calls; weights are there once, however often a layer is called."""
    calls = offer.calls[:1] if cost.quantity == "params" else offer.calls
    return sum(cost.price(call, form).value for call in calls)


def _of_network(forms: Mapping[str, tuple[Form, ...]], cost: NetworkCost) -> PriceList:
    """What a network's cost says of one change at a time: it is linear, so the changes add up."""
    dense = cost.of({}).value
    prices = {name: tuple(cost.of({name: form}).value - dense for form in row) for name, row in forms.items()}
    return PriceList("latency", cost.unit, forms, prices, dense, dense)
