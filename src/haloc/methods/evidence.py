"""What a method found out about the candidates, apart from any budget: enough to choose again for another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from pathlib import Path
from typing import Any

from haloc.errors import BudgetError, FileFormatError, shown
from haloc.files import naming, read_json, write_json
from haloc.forms import Dense
from haloc.methods.budget import Limit
from haloc.methods.solve import grown, least_largest, least_sum
from haloc.plan import Plan
from haloc.space import RankSpace
from haloc.training.journal import finite

KIND = "haloc-search"
FORMAT = 1
RULES = ("sum", "likeliest", "largest", "seen")


@dataclass(frozen=True)
class Evidence:
    """What a method found out, from which a plan follows for every budget and every table of prices.

    Attributes:
        method: The method's name.
        space: What it chose from.
        losses: For every candidate of every open layer, in the order of the space, a number: the less the better,
            infinite for what the method does not consider. HALOC: −log p.
        rule: What is least in the plan: the "sum" of the losses, the "largest" of them, or the loss of a network that
            the method has "seen" as a whole. With "likeliest" it is the sum of losses that are −log p, and what is then
            left of the budgets goes to larger ranks: a probability tells what suits the network, not what is left over.
        seen: Whole networks and their losses, for that rule.
        settings: What the method was told, as plain values.
        history: A row of figures for every epoch or round, as plain values.
        finished: False where the method's time was up.
    """

    method: str
    space: RankSpace
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    rule: str = "sum"
    seen: Sequence[tuple[Plan, float]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    history: Sequence[Mapping[str, Any]] = ()
    finished: bool = True

    def plan(self, limits: Sequence[Limit]) -> Plan:
        """The plan under these limits; a `BudgetError` says what can be reached where there is none."""
        if self.rule == "seen":
            return self._best_seen(limits)
        if self.rule == "likeliest":
            return grown(least_sum(self.losses, limits), limits)
        return (least_sum if self.rule == "sum" else least_largest)(self.losses, limits)

    @property
    def probabilities(self) -> dict[str, list[float]]:
        """Of losses that are −log p: p."""
        return {name: [exp(-loss) for loss in row] for name, row in self.losses.items()}

    def _best_seen(self, limits: Sequence[Limit]) -> Plan:
        fits = [all(limit.holds(plan) for limit in limits) for plan, _ in self.seen]
        fitting = [(loss, number) for number, (_, loss) in enumerate(self.seen) if fits[number]]
        if fitting:
            return self.seen[min(fitting)[1]][0]
        reachable = {x.prices.quantity: min(x.prices.cost_of(plan) for plan, _ in self.seen) for x in limits}
        best = ", ".join(f"{name} {value:.4g}" for name, value in reachable.items())
        raise BudgetError(
            f"none of the {len(self.seen)} networks that method {self.method!r} has seen keeps to the budget, the best "
            f"have {best}; search again for this budget",
            reachable,
        )

    def to_dict(self) -> dict[str, Any]:
        """Writes it as plain JSON values; null stands for infinity."""
        return {
            "kind": KIND,
            "format": FORMAT,
            "method": self.method,
            "rule": self.rule,
            "finished": self.finished,
            "settings": dict(self.settings),
            "space": self.space.to_dict(),
            "losses": {name: [_written(loss) for loss in row] for name, row in self.losses.items()},
            "seen": [{"plan": plan.to_dict(), "loss": _written(loss)} for plan, loss in self.seen],
            "history": [finite(row) for row in self.history],
        }

    @classmethod
    def from_dict(cls, value: Any) -> Evidence:
        """Reads what `to_dict` wrote; anything else is refused with the reason."""
        if not isinstance(value, dict) or value.get("kind") != KIND:
            raise FileFormatError(f'not what a search found: expected a JSON object with "kind": "{KIND}"')
        if value.get("format") != FORMAT:
            found = shown(value.get("format"))
            raise FileFormatError(f"search format {found} is not known; this version reads {FORMAT}")
        try:
            return cls(
                str(value["method"]),
                RankSpace.from_dict(value["space"]),
                {name: tuple(map(_read, row)) for name, row in value["losses"].items()},
                value["rule"],
                tuple((Plan.from_dict(entry["plan"]), _read(entry["loss"])) for entry in value["seen"]),
                dict(value["settings"]),
                tuple(map(dict, value["history"])),
                bool(value["finished"]),
            )._checked()
        except FileFormatError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileFormatError(f"what the search found is incomplete or malformed: {shown(error)}") from error

    def save(self, path: str | Path) -> None:
        """Writes it as a JSON file, whole or not at all."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Evidence:
        """Reads such a file."""
        with naming(path):
            return cls.from_dict(read_json(path))

    def _checked(self) -> Evidence:
        """Refuses what no plan could follow from."""
        if self.rule not in RULES:
            raise FileFormatError(f"unknown rule {shown(self.rule)}, expected one of {', '.join(RULES)}")
        offers = self.space.open_layers
        if self.rule == "seen":
            fits = bool(self.seen) and all(_within(plan, self.space) for plan, _ in self.seen)
        else:
            fits = {name: len(row) for name, row in self.losses.items()} == {n: len(o) for n, o in offers.items()}
        if not fits:
            raise FileFormatError("the losses are not those of the space: every candidate of every open layer has one")
        return self


def _within(plan: Plan, space: RankSpace) -> bool:
    return all(name in space.layers for name in plan) and all(
        plan.get(name, Dense()) in offer for name, offer in space.open_layers.items()
    )


def _written(loss: float) -> float | None:
    """JSON has no infinity."""
    return None if loss == inf else loss


#: Sums of losses are still numbers.
_LARGEST = 1e300


def _read(value: Any) -> float:
    if value is None:
        return inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise FileFormatError(f"a loss is a number, or null for what is not considered; got {shown(value)}")
    return float(value)
