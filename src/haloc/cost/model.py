"""What every cost model has in common: a price for a layer written in a form, with a unit and an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import hypot
from typing import Protocol

from haloc.forms import Dense, Form
from haloc.inventory import Inventory
from haloc.shapes import Shape


@dataclass(frozen=True)
class Estimate:
    """A number and how far off it may be.

    Attributes:
        value: The number, in the unit of the cost model it comes from.
        error: Half the width of the range around it; 0 where it is exact.
    """

    value: float
    error: float = 0.0

    def __add__(self, other: Estimate) -> Estimate:
        """Adds values, and errors as those of independent measurements."""
        return Estimate(self.value + other.value, hypot(self.error, other.error))


class CostModel(Protocol):
    """Prices a layer in a form; what it cannot price raises a `CostError`."""

    @property
    def quantity(self) -> str:
        """What is priced: latency, energy, macs, params, …."""

    @property
    def unit(self) -> str:
        """The unit of its prices, such as ms; empty for plain counts."""

    def price(self, shape: Shape, form: Form) -> Estimate:
        """The cost of one layer of ``shape`` written in ``form``."""


def layers_cost(layers: Inventory, plan: Mapping[str, Form], cost: CostModel) -> Estimate:
    """The sum over all layers and calls of a network under ``plan``; layers that it does not name are dense."""
    layers.check(plan)
    prices = [cost.price(call, plan.get(layer.name, Dense())) for layer in layers for call in layer.calls]
    return sum(prices, Estimate(0.0))
