"""The curves of a report: latency over rank, the search, the trade-off, and the training."""

from __future__ import annotations

from typing import Any

from haloc.cost.count import Count
from haloc.cost.table import Table
from haloc.errors import HalocError
from haloc.forms import Dense, Form, ranks
from haloc.methods.budget import Limit, limits_of
from haloc.pipeline.choose import cost_under
from haloc.pipeline.settings import finetuning, search_training
from haloc.pipeline.stamps import FILE
from haloc.pipeline.work import FINETUNE, Work
from haloc.report.page.curves import GIVEN, NOT_NEEDED
from haloc.report.pareto import loss_of, trade_off
from haloc.shapes import Shape, as_deployed

#: So many of the most expensive layers are drawn.
DRAWN = 4
#: Networks along the trade-off.
POINTS = 12


def staircase_facts(work: Work) -> list[dict[str, Any]]:
    """Latency over rank of the shapes that take most of the dense network's time."""
    table = work.table
    if table is None:
        return []
    plan, places = work.plan, _places(work)
    shapes = [shape for shape in places if len(table.forms_of(shape)) > 2 and Dense() in table.forms_of(shape)]
    shapes.sort(key=lambda shape: -len(places[shape]) * table.price(shape, Dense()).value)
    return [
        _staircase(table, shape, places[shape], [plan.get(n, Dense()) for n in places[shape]])
        for shape in shapes[:DRAWN]
    ]


def _places(work: Work) -> dict[Shape, list[str]]:
    """The layers of every shape that has something to choose from."""
    found: dict[Shape, list[str]] = {}
    for name, choices in work.space.open_layers.items():
        for call in choices.calls:
            found.setdefault(as_deployed(call), []).append(name)
    return found


def _staircase(table: Table, shape: Shape, names: list[str], chosen: list[Form]) -> dict[str, Any]:
    families: dict[str, list[dict[str, Any]]] = {}
    for form in table.forms_of(shape):
        if not isinstance(form, Dense):
            price = table.price(shape, form)
            point = {"ranks": list(ranks(form)), "cost": price.value, "error": price.error, "chosen": form in chosen}
            families.setdefault(form.name, []).append(point)
    ordered = {name: sorted(points, key=_ranks) for name, points in families.items()}
    listed = [{"form_kind": name, "points": points} for name, points in ordered.items()]
    dense = table.price(shape, Dense()).value
    return {"layer": names[0], "count": len(names), "unit": table.unit, "dense": dense, "families": listed}


def _ranks(point: dict[str, Any]) -> list[int]:
    found: list[int] = point["ranks"]
    return found


def search_facts(work: Work) -> dict[str, Any]:
    """How the search went."""
    evidence, training = work.evidence, search_training(work.recipe)
    limits = limits_of(work.space, work.budget, work.budgeted)
    budgets = [_spent(work, limit, cost_under(work, limit, work.plan)) for limit in limits]
    seconds = work.json(FILE)["stages"].get("search", {}).get("seconds")
    if evidence is None:
        who = NOT_NEEDED if work.recipe.search.plan is None else GIVEN
        return {"method": who, "seconds": seconds, "settings": {}, "history": [], "budgets": budgets}
    settings = dict(evidence.settings) | ({} if training is None else {"epochs": training.epochs})
    history = [{key: value for key, value in row.items() if isinstance(value, int | float)} for row in evidence.history]
    return {"method": evidence.method, "seconds": seconds, "settings": settings, "history": history, "budgets": budgets}


def _spent(work: Work, limit: Limit, cost: float) -> dict[str, Any]:
    own, prices = {"cost": cost, "budget": limit.budget}, limit.prices
    dense = prices.dense / work.left(prices.quantity)  # before narrowing
    return {"name": prices.quantity, "unit": prices.unit, **own, "dense": dense, "remains": cost / dense}


def pareto_facts(work: Work) -> dict[str, Any] | None:
    """What other budgets would have bought, as the search sees it."""
    name = next(iter(work.recipe.budget))
    evidence = work.evidence
    if evidence is None or evidence.rule == "seen":
        return None
    try:
        curve = trade_off(evidence, POINTS, _priced(work, name))
        own = loss_of(evidence, work.plan)
    except (HalocError, ValueError):
        return None  # the plan was edited to something that the search did not look at
    dense = curve.dense / work.left(name)  # before narrowing
    points = [{"cost": p.cost, "share": p.cost / dense, "loss": p.loss, "chosen": False} for p in curve.points]
    cost = search_cost(work, name)
    if cost is not None:
        points.append({"cost": cost, "share": cost / dense, "loss": own, "chosen": True})
    points.sort(key=lambda point: float(point["cost"]))
    return {"quantity": name, "unit": curve.unit, "dense": dense, "points": points}


def _priced(work: Work, name: str) -> Any:
    return (work.costs | work.counted).get(name) or Count(name)


def search_cost(work: Work, name: str) -> float | None:
    """What the plan costs by the prices that it was chosen by."""
    return next((float(row["cost"]) for row in search_facts(work)["budgets"] if row["name"] == name), None)


def finetune_facts(work: Work) -> dict[str, Any] | None:
    """How the training went; None where nothing was trained."""
    told, path = finetuning(work.recipe, work.job.loss is not None), f"{FINETUNE}/outcome.json"
    if told is None or work.job.train is None or not work.file(path).exists():
        return None
    outcome = work.json(path)
    training, goals = told
    settings = {"epochs": training.epochs, "lr": training.lr, "schedule": training.schedule}
    settings |= {"distillation": goals.distillation, "norm_between": goals.norm_between}
    return {"seconds": outcome["seconds"], "settings": settings, "history": outcome["history"]}
