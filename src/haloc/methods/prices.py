"""What every network of a space costs: a price for each candidate of each layer, and the rest that never changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from haloc.cost.model import CostModel
from haloc.errors import BudgetError, SpecError
from haloc.forms import Dense, Form
from haloc.space import LayerChoices, RankSpace


@dataclass(frozen=True)
class PriceList:
    """The paper's M for a whole space, in the unit of the cost model it comes from.

    Attributes:
        forms: The candidates of every open layer, in the order of the space.
        prices: What each of them costs, over all calls of the layer.
        rest: What the layers with nothing to choose cost.
        dense: What the network costs as it is.
        unit: The unit, such as ms; empty for plain counts.
    """

    forms: Mapping[str, tuple[Form, ...]]
    prices: Mapping[str, tuple[float, ...]]
    rest: float
    dense: float
    unit: str = ""

    @classmethod
    def of(cls, space: RankSpace, cost: CostModel) -> PriceList:
        """Asks for all prices; what has none raises a `CostError`."""
        forms = {name: tuple(offer) for name, offer in space.open_layers.items()}
        prices = {name: tuple(_price(space.layers[name], form, cost) for form in forms[name]) for name in forms}
        dense = {name: _price(offer, Dense(), cost) for name, offer in space.layers.items()}
        rest = sum(price for name, price in dense.items() if name not in forms)
        return cls(forms, prices, rest, sum(dense.values()), cost.unit)

    @property
    def cheapest(self) -> float:
        """The cost of the cheapest network of the space."""
        return self.rest + sum(map(min, self.prices.values()))

    def cost_of(self, plan: Mapping[str, Form]) -> float:
        """The cost of a network of the space."""
        return self.rest + sum(self.prices[name][forms.index(plan[name])] for name, forms in self.forms.items())

    def budget(self, wanted: float) -> float:
        """The budget ε in the prices' unit: ``wanted`` itself, or where it is below 1, that share of the dense cost.

        Raises:
            BudgetError: not even the cheapest network keeps to it.
        """
        if not 0 < wanted < float("inf"):
            raise SpecError(f"a budget must be a number above 0, got {wanted}")
        budget = wanted * self.dense if wanted < 1 else wanted
        if self.cheapest > budget:
            raise BudgetError(
                f"a budget of {budget:.4g} {self.unit}".rstrip() + " cannot be reached: the cheapest candidates of all "
                f"layers still cost {self.cheapest:.4g}, {self.cheapest / self.dense:.1%} of the dense network; offer "
                "lower ranks or a larger budget"
            )
        return budget


def _price(offer: LayerChoices, form: Form, cost: CostModel) -> float:
    return sum(cost.price(call, form).value for call in offer.calls)
