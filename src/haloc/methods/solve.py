"""The exact choice: the best candidates of all layers together among the networks that keep to every budget.

A multiple-choice knapsack, solved to the optimum by branch and bound (`scipy.optimize.milp`). Where the proof that it
is the optimum takes more than a minute, what was found until then is taken, and said so. The solver works with
tolerances; what it returns is added up again here, and a network that is over a budget by a rounding is ruled out.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import inf, log
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from haloc.errors import BudgetError, HalocError
from haloc.forms import Form, ranks
from haloc.methods.budget import Limit, Spending, spending
from haloc.plan import Plan

Losses = Mapping[str, Sequence[float]]
Vector = NDArray[np.float64]

_log = logging.getLogger("haloc")

#: What losses and budgets are stretched to: the solver is content within 1e-6 of what is right, whatever the scale.
_SPREAD = 1e4


def least_sum(losses: Losses, limits: Sequence[Limit]) -> Plan:
    """The network with the least sum of losses that keeps to all limits; the least of every layer where that does.

    Args:
        losses: A number per candidate of every open layer, the less the better; infinite for what must not be taken.
        limits: What the network may cost.

    Raises:
        BudgetError: No network keeps to them; the message says which comes nearest.
    """
    problem = _Problem.of(losses, limits)
    best = [int(row.argmin()) for row in problem.rows]
    if problem.fits(best):
        return problem.plan(best)
    found = problem.least(problem.stretched)
    return problem.plan(found) if found is not None else problem.refuse()


def least_largest(losses: Losses, limits: Sequence[Limit]) -> Plan:
    """The network whose largest loss is least, and of several such one whose other large losses are small too.

    At a level every layer may take the candidates whose loss is not above it. At the lowest level that keeps to all
    limits, what is left of the budgets goes to lowering the losses nearest to the level (the least sum of their eighth
    powers): layers of one shape step down together, and would else leave up to a fifth of a budget unspent.
    """
    levels = sorted({loss for row in losses.values() for loss in row if loss < inf})

    def up_to(level: float) -> Losses:
        return {name: [loss if loss <= level else inf for loss in row] for name, row in losses.items()}

    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        fits = _Problem.of(up_to(levels[middle]), limits).cheapest() is not None
        low, high = (low, middle) if fits else (middle + 1, high)
    level = levels[low] if levels else 0.0
    scale = max(abs(level), 1e-300)
    powers = {name: [(loss / scale) ** 8 for loss in row] for name, row in up_to(level).items()}
    return least_sum(powers, limits)


def grown(plan: Mapping[str, Form], limits: Sequence[Limit]) -> Plan:
    """The network with what the limits leave over spent on larger ranks of the same forms.

    Of all that fit, the one with the largest sum of the ranks' logarithms: small ranks gain most by it. A larger rank
    can do all that a smaller one can, so nothing that spoke for the plan is lost.
    """
    forms = limits[0].prices.forms
    return least_sum({name: [_shrinkage(plan[name], form) for form in row] for name, row in forms.items()}, limits)


def within(small: Form, large: Form) -> bool:
    """Whether it is the same form, no rank being smaller."""
    return type(small) is type(large) and all(a <= b for a, b in zip(ranks(small), ranks(large), strict=True))


def _shrinkage(chosen: Form, form: Form) -> float:
    """Below zero the larger the ranks are; infinite where it is another form, or smaller in some rank."""
    if not within(chosen, form):
        return inf
    return -sum(log(other / own) for own, other in zip(ranks(chosen), ranks(form), strict=True))


def check_reachable(limits: Sequence[Limit]) -> None:
    """Raises a `BudgetError` that names the nearest network where none keeps to all limits."""
    problem = _Problem.of({name: [0.0] * len(row) for name, row in limits[0].prices.forms.items()}, limits)
    if problem.cheapest() is None:
        problem.refuse()


@dataclass(frozen=True, eq=False)
class _Problem:
    """Losses and costs of all candidates: variables are one per candidate, 1 where it is taken.

    Attributes:
        forms: The candidates of every layer.
        rows: Their losses.
        limits: What the network may cost.
        costs: A row per limit: what each candidate costs above the cheapest of its layer, where 1 is all there is to
            spend. So prices may be of any size and sign.
    """

    forms: Mapping[str, tuple[Form, ...]]
    rows: tuple[Vector, ...]
    limits: tuple[Limit, ...]
    costs: Vector

    @classmethod
    def of(cls, losses: Losses, limits: Sequence[Limit]) -> _Problem:
        forms = limits[0].prices.forms
        rows = tuple(np.array(losses[name], dtype=float) for name in forms)
        return cls(forms, rows, tuple(limits), np.array([_above_cheapest(limit) for limit in limits]))

    @cached_property
    def _affordable(self) -> NDArray[np.bool_]:
        """Which candidates could be taken at all, were all other layers as cheap as can be."""
        return np.asarray((self.costs <= 1 + 1e-6).all(axis=0) & np.isfinite(np.concatenate(self.rows)))

    def plan(self, chosen: Sequence[int]) -> Plan:
        return Plan({name: row[index] for (name, row), index in zip(self.forms.items(), chosen, strict=True)})

    def fits(self, chosen: Sequence[int]) -> bool:
        """Whether all losses are finite and all limits hold, to the last bit."""
        finite = all(row[index] < inf for row, index in zip(self.rows, chosen, strict=True))
        return finite and all(limit.holds(self.plan(chosen)) for limit in self.limits)

    def cheapest(self) -> list[int] | None:
        """The choice that takes up least of the budgets, summed over them, among those that fit."""
        spent = self.costs.sum(axis=0)
        best = self._least_each(spent)
        if self.fits(best):
            return best
        return None if len(self.limits) == 1 else self.least(spent)

    def least(self, objective: Vector) -> list[int] | None:
        """The choice with the least objective among those that fit, or None."""
        if any(limit.prices.cheapest > limit.budget for limit in self.limits):
            return None
        ruled_out: list[list[int]] = []
        while True:
            found = self._relaxed(objective, ruled_out)
            if found is None or self.fits(found):
                return found
            ruled_out.append(found)

    def refuse(self) -> NoReturn:
        """Raises what is to be said where nothing fits."""
        rows = spending(self.limits, self.plan(self._nearest()))
        over = " and ".join(f"{_said(row, row.budget)} for {row.quantity}" for row in rows)
        best = ", ".join(f"{row.quantity} {_said(row, row.cost)}" for row in rows)
        word = "a budget" if len(rows) == 1 else "budgets"
        raise BudgetError(
            f"{word} of {over} cannot be reached: the nearest that is on offer has {best}; "
            f"offer lower ranks or other forms, or allow more",
            {row.quantity: row.cost for row in rows},
        )

    @cached_property
    def stretched(self) -> Vector:
        """The losses from 0 for the best of a layer up; what is infinite is excluded elsewhere."""
        finite = [np.where(np.isfinite(row), row, min(row.min(), 1e300)) for row in self.rows]
        above = np.concatenate([row - row.min() for row in finite])
        return above * (_SPREAD / max(float(above.max()), 1e-300))

    def _least_each(self, values: Vector) -> list[int]:
        """The least value of every layer that is allowed; of equals the one with the least loss."""
        pairs = zip(np.split(values, self._ends), self.rows, strict=True)
        return [int(np.lexsort((row, np.where(np.isfinite(row), own, inf)))[0]) for own, row in pairs]

    @cached_property
    def _ends(self) -> list[int]:
        return list(np.cumsum([len(row) for row in self.rows])[:-1])

    @cached_property
    def _one_per_layer(self) -> csr_array:
        owner = np.repeat(np.arange(len(self.rows)), [len(row) for row in self.rows])
        return csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))))

    def _relaxed(self, objective: Vector, ruled_out: Sequence[Sequence[int]]) -> list[int] | None:
        """What the solver finds; it may be over a limit by the solver's tolerance.

        Layers that are alike in everything are one variable that counts them: else the solver would try their choices
        in every order, which can take for ever.
        """
        # A little less each time: networks of equal layers come in many orders, all of them over by the same.
        room = _SPREAD * (1 - 1e-9 * len(ruled_out))
        groups = self._alike(objective)
        columns = np.concatenate([self._columns[group[0]] for group in groups])
        sizes = np.array([len(group) for group in groups])
        widths = [len(self.rows[group[0]]) for group in groups]
        owner = np.repeat(np.arange(len(groups)), widths)
        one_each = csr_array((np.ones(len(owner)), (owner, np.arange(len(owner)))))
        costs = np.where(self._affordable, self.costs, 0.0)[:, columns] * _SPREAD
        constraints = [LinearConstraint(one_each, sizes, sizes), LinearConstraint(costs, -inf, room)]
        if len(groups) == len(self.rows):
            constraints += [LinearConstraint(self._taken(chosen), -inf, len(chosen) - 1) for chosen in ruled_out]
        bounds = Bounds(0, np.where(self._affordable[columns], sizes[owner], 0.0))
        with _silent():
            answer = milp(objective[columns], integrality=1, bounds=bounds, constraints=constraints, options=_OPTIONS)
        if not _solved(answer):
            return None
        counts = np.split(np.rint(answer.x).astype(int), np.cumsum(widths)[:-1])
        chosen = np.zeros(len(self.rows), dtype=int)
        for group, count in zip(groups, counts, strict=True):
            chosen[group] = np.repeat(np.arange(len(count)), count)
        return [int(index) for index in chosen]

    def _alike(self, objective: Vector) -> list[list[int]]:
        """The layers by their numbers, those together whose candidates have the same objective and costs."""
        found: dict[bytes, list[int]] = {}
        known = np.vstack([objective, self.costs, self._affordable])
        for number, columns in enumerate(self._columns):
            found.setdefault(np.ascontiguousarray(known[:, columns]).tobytes(), []).append(number)
        return list(found.values())

    @cached_property
    def _columns(self) -> list[NDArray[np.int64]]:
        """Where the candidates of every layer are among all of them."""
        return np.split(np.arange(self.costs.shape[1]), self._ends)

    def _nearest(self) -> list[int]:
        """The choice that is least over any of its budgets: the least t with cost ≤ t·budget for all of them."""
        if len(self.limits) == 1:
            return self._least_each(self.costs[0])
        finite = np.isfinite(np.concatenate(self.rows)).astype(float)
        shares = np.array([_of_budget(limit) for limit in self.limits])
        rest = np.array([limit.prices.rest / limit.budget for limit in self.limits])
        one_per_layer = np.hstack([self._one_per_layer.toarray(), np.zeros((len(self.rows), 1))])
        within = np.hstack([shares, -np.ones((len(shares), 1))])
        with _silent():
            answer = milp(
                np.append(np.zeros(shares.shape[1]), _SPREAD),
                integrality=np.append(np.ones(shares.shape[1]), 0),
                bounds=Bounds(np.append(np.zeros(shares.shape[1]), -inf), np.append(finite, inf)),
                constraints=[LinearConstraint(one_per_layer, 1, 1), LinearConstraint(within, -inf, -rest)],
                options=_OPTIONS,
            )
        if not _solved(answer):
            return [int(row.argmin()) for row in self.rows]
        return [int(row.argmax()) for row in np.split(answer.x[:-1], self._ends)]

    def _taken(self, chosen: Sequence[int]) -> Vector:
        """A row that counts how many of these candidates are taken."""
        row = np.zeros(self.costs.shape[1])
        row[np.array(chosen) + np.array([0, *self._ends])] = 1
        return row


def _solved(answer: Any) -> bool:
    """Whether there is a solution; False where it was proved that there is none, an error where neither was found."""
    if answer.x is not None and answer.status == 0:
        return True
    if answer.x is not None and answer.status == 1:
        _log.warning(
            "the choice of ranks was not proved to be the best within %g s: the best can be better by %.2g%% at most",
            _OPTIONS["time_limit"],
            100 * answer.mip_gap,
        )
        return True
    if answer.status == 2:
        return False
    raise HalocError(f"the exact solver gave up: {answer.message}; offer fewer candidates")


#: Two budgets and many layers that are nearly alike can keep the proof going for minutes; a solution is there at once.
_OPTIONS = {"mip_rel_gap": 0.0, "time_limit": 60.0}


@contextmanager
def _silent() -> Iterator[None]:
    """Keeps the solver's stray debugging lines, which it prints past Python, out of what a command writes."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except (OSError, ValueError, AttributeError):  # there is no output to spoil
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _above_cheapest(limit: Limit) -> Vector:
    """All candidates' costs above the cheapest of their layers, in parts of what can be spent on that."""
    rows = [np.array(row, dtype=float) for row in limit.prices.prices.values()]
    above = np.concatenate([row - row.min() for row in rows])
    room = limit.budget - limit.prices.rest - sum(float(row.min()) for row in rows)
    # Where nothing is left to spend, everything above the cheapest is far too much, rather than a division by zero.
    return above / max(room, 1e-9 * max(float(above.max()), 1e-300))


def _of_budget(limit: Limit) -> Vector:
    return np.concatenate([np.array(row, dtype=float) / limit.budget for row in limit.prices.prices.values()])


def _said(row: Spending, value: float) -> str:
    return f"{value:.4g} {row.unit}".rstrip() + f" ({value / row.dense:.1%})"
