"""Plans that have been made: the rows they need, and whole networks on the way from the dense one to them.

Choosing a plan takes prices of all forms of all layers. Saying how long a chosen one takes needs its own rows and whole
networks that have no others: those in which only some of the layers are changed. All of them are measured, so nothing
is predicted but the whole.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import TypeVar

import numpy as np

from haloc.cost.measure import RowKey
from haloc.cost.network import LEAST_TIMED, PLANS, Timing
from haloc.cost.predict import Predictor, completed
from haloc.cost.table import Table
from haloc.forms import Dense, Form
from haloc.inventory import Inventory
from haloc.plan import Plan
from haloc.shapes import Shape, as_deployed

T = TypeVar("T")

#: How often a choice is drawn anew that was there before; few items have few choices.
DRAWS = 20


def plan_rows(layers: Inventory, plans: Sequence[Mapping[str, Form]]) -> tuple[RowKey, ...]:
    """What has to be priced for these plans alone: each distinct layer, as deployed, dense and as the plans write it.

    The forms of one layer stand together with dense first, as `RankSpace.rows` has them.
    """
    for plan in plans:
        layers.check(plan)
    found: dict[Shape, dict[Form, None]] = {}
    for layer in layers:
        forms = dict.fromkeys([Dense(), *(plan.get(layer.name, Dense()) for plan in plans)])
        for shape in map(as_deployed, layer.calls):
            found.setdefault(shape, {}).update(forms)
    return tuple((shape, form) for shape, forms in found.items() for form in forms)


def known_of(
    layers: Inventory, plan: Plan, table: Table, timings: Sequence[Timing]
) -> tuple[Table | Predictor, tuple[Timing, ...]]:
    """What a plan is to be predicted from: rows, and those of the timings that go with them.

    Where the table has all rows of the plan it is taken as it is, and networks of which it has not all rows are left
    aside, as long as enough are left to tell an error by. Else what it lacks is predicted, and all networks count.
    """
    of_these_rows = tuple(timing for timing in timings if _all_measured(layers, timing.plan, table))
    enough = len(of_these_rows) >= min(LEAST_TIMED, len(timings))
    if enough and _all_measured(layers, plan, table):
        return table, of_these_rows
    return completed(table), tuple(timings)


def _all_measured(layers: Inventory, plan: Plan, table: Table) -> bool:
    return all(row in table for row in plan_rows(layers, [plan]))


def plans_between(plans: Sequence[Plan], count: int = PLANS, seed: int = 0) -> dict[str, Plan]:
    """The dense network and networks between it and the plans, by name: each has some of one plan's changes.

    The plans take turns, and each goes from few changes to many; none of them is among the networks, so that what is
    learnt from these can be held against it. There are fewer than ``count`` where plans change too little.
    """
    wanted = [len(range(number, count - 1, len(plans))) for number in range(len(plans))]
    drawn = [
        [Plan(dict(chosen)) for chosen in some_of(list(plan.changes().items()), each, seed + number)]
        for number, (plan, each) in enumerate(zip(plans, wanted, strict=True))
    ]
    final = {_changed(plan) for plan in plans}
    taking_turns = dict.fromkeys(plan for plan in chain(*zip_longest(*drawn)) if plan is not None)
    between = [plan for plan in taking_turns if _changed(plan) not in final]
    return {"dense": Plan({})} | {f"between-{number}": plan for number, plan in enumerate(between)}


def _changed(plan: Plan) -> Plan:
    """The plan without what it leaves dense: the same network."""
    return Plan(plan.changes())


def some_of(items: Sequence[T], count: int, seed: int = 0) -> list[tuple[T, ...]]:
    """Different random choices of some of the items, evenly from one of them to all but one, each in their order.

    There are fewer than ``count`` where the items have fewer.
    """
    draw, found = random.Random(seed), list[tuple[int, ...]]()
    # From the end, so that a single one is close to all.
    sizes = np.linspace(len(items) - 1, 1, count).round().astype(int)[::-1] if len(items) > 1 else ()
    for size in sizes:
        for _ in range(DRAWS):
            chosen = tuple(sorted(draw.sample(range(len(items)), int(size))))
            if chosen not in found:
                found.append(chosen)
                break
    return [tuple(items[index] for index in chosen) for chosen in found]
