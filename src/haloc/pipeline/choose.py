"""Ranks within a budget that holds on the clock: chosen, timed as a whole network, and chosen again if need be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from haloc.cost.count import Count
from haloc.cost.model import layers_cost
from haloc.cost.network import NetworkCost, time_networks
from haloc.cost.target import Target
from haloc.errors import BudgetError, PlanError
from haloc.files import write_json
from haloc.forms import form_to_dict
from haloc.methods.budget import Limit, is_share, limits_of
from haloc.methods.evidence import Evidence
from haloc.methods.search import SearchResult, solve
from haloc.pipeline.work import CHECKS, Work
from haloc.plan import Plan

KIND, FORMAT = "haloc-checks", 1
#: A little below what a measurement says is needed, so that the next one need not miss by a hair.
MARGIN = 0.995


@dataclass(frozen=True)
class Check:
    """A network that was timed as a whole against its latency budget.

    Attributes:
        plan: Its forms.
        predicted_ms: What the table said.
        latency_ms: What the clock said.
        error_ms: Half the spread of that.
        dense_ms: The uncompressed network, taking turns with it.
        allowed_ms: The budget: an amount, or a share of what the uncompressed network took in this very measurement.
        margin: The share of it that has to stay free.
    """

    plan: Plan
    predicted_ms: float
    latency_ms: float
    error_ms: float
    dense_ms: float
    allowed_ms: float
    margin: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the network kept to the budget, spread and margin included: others are to find the same."""
        return self.above <= 1

    @property
    def above(self) -> float:
        """What it takes, its spread included, over what it may take."""
        return (self.latency_ms + self.error_ms) / (self.allowed_ms * (1 - self.margin))

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {"plan": {name: form_to_dict(form) for name, form in self.plan.items()}}


def choose(work: Work, evidence: Evidence) -> SearchResult:
    """The plan that the evidence gives for the budgets; where latency is one, the clock has the last word."""
    result = solve(evidence, work.budget, work.budgeted)
    target = work.timed_here
    if target is None or "latency" not in work.recipe.budget:
        return result
    checks: list[tuple[Check, SearchResult]] = []
    wanted: Mapping[str, Any] = work.budget
    for attempt in range(max(1, work.recipe.target.attempts)):
        checks.append((_check(work, result, target, attempt), result))
        last = checks[-1][0]
        if last.holds:
            break
        wanted = dict(wanted) | {"latency": f"{_tightened(wanted, work, last)!r} ms"}
        try:
            result = solve(evidence, wanted, work.budgeted)
        except BudgetError:
            break  # nothing faster is on offer
    write_json(work.file(CHECKS), {"kind": KIND, "format": FORMAT, "checks": [check.to_dict() for check, _ in checks]})
    return next((result for check, result in checks if check.holds), min(checks, key=_latency)[1])


def _latency(pair: tuple[Check, SearchResult]) -> float:
    return pair[0].latency_ms / pair[0].dense_ms


def _check(work: Work, result: SearchResult, target: Target, attempt: int) -> Check:
    again = f", chosen again ({attempt + 1})" if attempt else ""
    plans = {"dense": Plan({}), "plan": result.plan}
    with work.listener.steps(f"timing the chosen network{again} and the dense one on {target}") as step:
        dense, plan = time_networks(*work.on_cpu(), plans, target, on_progress=step).timings
    limit = _limit(work, work.budget)
    allowed = limit.budget
    if is_share(work.recipe.budget["latency"]):
        allowed *= dense.latency_ms / limit.prices.dense
    predicted = limit.prices.cost_of(result.plan)
    times = plan.latency_ms, plan.iqr_ms / 2, dense.latency_ms
    check = Check(result.plan, predicted, *times, allowed, work.recipe.target.margin)
    said = "keeps to" if check.holds else "is over" if check.latency_ms > allowed else "comes too close to"
    work.listener.note(
        f"timed as a whole the network takes {check.latency_ms:.3g} ms and {said} its budget of {allowed:.3g} ms "
        f"({check.latency_ms / check.dense_ms:.1%} of the dense network's {check.dense_ms:.3g} ms)"
    )
    return check


def _tightened(wanted: Mapping[str, Any], work: Work, check: Check) -> float:
    """The next budget for the table's prices: lower by as much as the clock was above."""
    return MARGIN * min(_limit(work, wanted).budget, check.predicted_ms) / check.above


def cost_under(work: Work, limit: Limit, plan: Plan) -> float:
    """What a plan costs by the prices of a limit, or by what these come from where it was edited off the grid."""
    try:
        return limit.prices.cost_of(plan)
    except PlanError:
        name, layers = limit.prices.quantity, work.layers
        model = (work.costs | work.counted).get(name) or Count(name)
        if name in ("macs", "params") and not isinstance(model, NetworkCost):
            plain = layers.macs_of(plan) if name == "macs" else layers.params_of(plan)
            return plain + layers_cost(layers, plan, model).value - layers_cost(layers, plan, Count(name)).value
        return (model.of(plan) if isinstance(model, NetworkCost) else layers_cost(layers, plan, model)).value


def check_edited(work: Work) -> None:
    """Refuses a plan that does not fit the network, or that cannot be priced."""
    work.layers.check(work.plan)
    for limit in limits_of(work.space, work.budget, work.budgeted):
        cost_under(work, limit, work.plan)


def _limit(work: Work, budget: Mapping[str, Any]) -> Limit:
    """What the latency budget means for the table's prices."""
    (limit,) = limits_of(work.space, {"latency": budget["latency"]}, {"latency": work.costs["latency"]})
    return limit
