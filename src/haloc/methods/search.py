"""Choosing the ranks: one entrance to all methods, and choosing again from what a method found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from haloc.errors import BudgetError, SpecError, nearest
from haloc.factor.calibrate import InputMoments
from haloc.factor.forward import inputs_of
from haloc.methods.budget import Budget, Costs, Limit, Spending, limits_of, spending
from haloc.methods.evidence import Evidence
from haloc.methods.solve import check_reachable
from haloc.methods.task import Method, Rehearsal, Task
from haloc.plan import Plan
from haloc.space import RankSpace
from haloc.training.objective import LossFunction
from haloc.training.run import Progress
from haloc.training.session import Session
from haloc.training.settings import TrainSettings

#: The methods, each in a module of its name.
METHODS = ("haloc", "sensitivity", "genetic", "lc", "alds", "energy", "vbmf", "uniform", "random")


@dataclass(frozen=True)
class SearchResult:
    """Ranks that were chosen.

    Attributes:
        plan: The form of every open layer; it keeps to the budget.
        evidence: What the method found out, to be saved and solved again for other budgets.
        spending: What the network costs beside what it may, a row per budget.
    """

    plan: Plan
    evidence: Evidence
    spending: tuple[Spending, ...]

    @property
    def finished(self) -> bool:
        """Whether the method came to its end; False when the time was up."""
        return self.evidence.finished


def search(
    model: nn.Module,
    space: RankSpace,
    *,
    budget: Budget,
    cost: Costs = None,
    method: str | Method = "haloc",
    settings: Any = None,
    train: Any = None,
    val: Any = None,
    loss: LossFunction | None = None,
    inputs: Callable[[Any], Any] | None = None,
    moments: Mapping[str, InputMoments] | None = None,
    training: TrainSettings | None = None,
    folder: str | Path | None = None,
    resume: bool = True,
    session: Session | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_step: Callable[[int, int], None] | None = None,
    rehearsal: Rehearsal | None = None,
) -> SearchResult:
    """Chooses a form for every open layer of a network, within a budget.

    Args:
        model: The trained dense network, on the device to search on; it is not changed.
        space: What its layers may become, from `rank_space`.
        budget: What the network may cost: ``"60%"`` of today's cost, ``"4 ms"``, ``"12M"``, or several by name, as in
            ``{"macs": "28%", "params": "24%"}``. The plan keeps to all of them.
        cost: What is budgeted: a measured table, a predictor, a network's cost or a count, or several by name;
            multiply-adds unless told otherwise.
        method: One of `METHODS`, or a `Method` of your own.
        settings: What the method is to be told, such as `SearchSettings` for HALOC.
        train: Training batches: a data set's ``batches(…)``, or any loader of ``(inputs, targets)``; with a ``loss``
            any loader at all.
        val: Held-out batches, shuffled; not what the result will be judged by.
        loss: What the network was trained by, ``loss(model, batch)``: a scalar, or scalars by name whose sum it is. The
            batch is what the loader gave, on the model's device. Cross-entropy unless told otherwise.
        inputs: Takes the model's inputs out of a batch, for methods that run the network without its loss; by default
            the first of a tuple or list, and a dict as it is without its labels.
        moments: From `calibrate`, for factors that come closer to the network.
        training: How weights are trained, and for how long, by methods that train.
        folder: Where the method keeps what it takes to go on after an interruption; without it nothing is written.
        resume: Go on from what is in the folder, if there is something.
        session: This process among several, from `join_session`.
        on_progress: Called every few steps of training, for a progress bar.
        on_step: Called with ``(done, total)`` by methods that do not train.
        rehearsal: How the network will be fine-tuned once ranks are chosen, for methods that try that on some plans.

    Raises:
        BudgetError: No network of the space keeps to the budget; found out before anything else is done.
    """
    chosen = method_of(method) if isinstance(method, str) else method
    if not space.open_layers:
        raise SpecError("the space has nothing to choose from: no layer has another form than dense on offer")
    limits = limits_of(space, budget, cost)
    check_reachable(limits)
    task = Task(
        model, space, limits, train, val, moments, training, None if folder is None else Path(folder), resume, session,
        on_progress, on_step, loss=loss, inputs=None if inputs is inputs_of else inputs, rehearsal=rehearsal,
    )  # fmt: skip
    return _result(chosen(task, settings), limits)


def solve(evidence: Evidence, budget: Budget, cost: Costs = None) -> SearchResult:
    """Chooses again from what a method found, for another budget or another target's prices, without searching.

    Args:
        evidence: From a result, or `Evidence.load`.
        budget: As in `search`.
        cost: As in `search`.
    """
    return _result(evidence, limits_of(evidence.space, budget, cost))


def pareto(evidence: Evidence, budgets: Sequence[Budget], cost: Costs = None) -> tuple[SearchResult, ...]:
    """A plan for each of many budgets, without those that cannot be reached."""
    found = []
    for budget in budgets:
        with suppress(BudgetError):
            found.append(solve(evidence, budget, cost))
    return tuple(found)


def method_of(name: str) -> Method:
    """The method of that name."""
    if name not in METHODS:
        raise SpecError(f"unknown method {name!r}, expected one of {', '.join(METHODS)}.{nearest(name, METHODS)}")
    found: Method = import_module(f"haloc.methods.{name}").METHOD
    return found


def _result(evidence: Evidence, limits: tuple[Limit, ...]) -> SearchResult:
    plan = evidence.plan(limits)
    return SearchResult(plan, evidence, spending(limits, plan))
