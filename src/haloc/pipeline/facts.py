"""What a run found out, gathered from the files of its stages as plain values: what ``report.json`` holds."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import torch

from haloc import __version__
from haloc.cost.machine import environment
from haloc.cost.model import Estimate, layers_cost
from haloc.cost.network import NetworkCost, NetworkTimings
from haloc.methods.budget import Limit, is_share, limits_of
from haloc.pipeline.choose import cost_under
from haloc.pipeline.curves import finetune_facts, pareto_facts, search_facts, staircase_facts
from haloc.pipeline.layer_facts import layer_facts
from haloc.pipeline.recover import finished, untrained
from haloc.pipeline.stamps import FILE
from haloc.pipeline.variants import (
    DENSE_FILE,
    SMALL_FILE,
    export_facts,
    exports_of,
    final,
    times_on_target,
    variants,
)
from haloc.pipeline.work import CHECKS, FIGURES, NETWORKS, OUTCOME, Work
from haloc.training.journal import finite

KIND, FORMAT = "haloc-report", 1

Pair = tuple[Estimate, Estimate]


def gather(work: Work) -> dict[str, Any]:
    """All facts of a run."""
    figures, labels = work.json(FIGURES), work.job.labels
    latency = _measured(work, figures)
    rows = _figures(work, figures, latency)
    name, target = labels["model"]["name"], work.target
    facts: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "title": name if target is None else f"{name} on {target}",
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "model": dict(labels["model"]),
        "data": labels.get("data"),
        "target": None if target is None else _target(work),
        "verdict": _verdict(work, rows),
        "figures": rows,
        "variants": variants(work, figures, _params(work)),
        "layers": _layer_facts(work),
        "staircases": staircase_facts(work),
        "search": search_facts(work),
        "pareto": pareto_facts(work),
        "prediction": _prediction(work, latency),
        "finetune": finetune_facts(work),
        "exports": export_facts(work, figures),
        "stages": _stages(work),
        "environment": _environment(work),
        "reproduce": _reproduce(work),
        "recipe": work.recipe.to_toml(),
        "notes": _notes(work, rows),
    }
    plain: dict[str, Any] = finite(facts)
    return plain


def _reproduce(work: Work) -> str:
    if work.recipe.model.name is None:
        return "haloc.compress(model, example_inputs, …) in Python, with the sections of the recipe as arguments"
    return "haloc compress recipe.toml"


def _measured(work: Work, figures: Mapping[str, Any]) -> Pair | None:
    """Both networks' latency on the target: as exported files where that is what runs there, else in torch."""
    times = times_on_target(work, figures)
    for before, after in ((f"{DENSE_FILE}.onnx", f"{SMALL_FILE}.onnx"), ("dense", "model")):
        if before in times and after in times:
            return Estimate(*times[before]), Estimate(*times[after])
    return None


def _predicted(work: Work, quantity: str) -> Pair | None:
    model = work.costs.get(quantity)
    if model is None:
        return None
    if isinstance(model, NetworkCost):
        dense, small = model.of({}), model.of(work.plan)
    else:
        dense, small = layers_cost(work.layers, {}, model), layers_cost(work.layers, work.plan, model)
    left = work.left(quantity)
    return Estimate(dense.value / left, dense.error / left), small


def _figures(work: Work, figures: Mapping[str, Any], latency: Pair | None) -> list[dict[str, Any]]:
    """Before and after, in the order in which they are shown."""
    rows = [_score_row(work, figures["scores"])] if figures["scores"] else []
    target = str(work.target)
    if latency is not None:
        rows.append(_row("latency", "latency, measured", "ms", *latency) | {"on": target, "how": "measured"})
    elif "latency" in work.costs:
        said = "modelled" if target.startswith("asic") else "predicted"
        pair = _predicted(work, "latency")
        assert pair is not None
        rows.append(_row("latency", f"latency, {said}", "ms", *pair) | {"on": target, "how": "predicted"})
    energy = _predicted(work, "energy")
    if energy is not None:
        rows.append(_row("energy", "energy, modelled", "mJ", *energy) | {"on": target, "how": "predicted"})
    layers, plan = work.layers, work.plan
    rows.append(_count("macs", "multiply-adds", work.original.macs, layers.macs_of(plan)))
    rows.append(_count("params", "parameters", work.original.params, _params(work)))
    sizes = {row["path"].rpartition(".")[0]: row["bytes"] for row in exports_of(work) if row["format"] == "onnx"}
    if DENSE_FILE in sizes and SMALL_FILE in sizes:
        rows.append(_count("file_bytes", "ONNX file", sizes[DENSE_FILE], sizes[SMALL_FILE]) | {"unit": "B"})
    limits = {limit.prices.quantity: limit for limit in _limits(work)}
    return [row | _budget(work, row, limits) for row in rows]


def _score_row(work: Work, scores: Mapping[str, float]) -> dict[str, Any]:
    job, last = work.job, scores[final(work)]
    data = job.labels.get("data") or {}
    on = f"{data['test']:,} test images of {data['name']}" if "test" in data else None
    if job.score is not None:
        name = str(job.labels.get("score", "score"))
        return {"key": "score", "name": name, "unit": "", "before": scores["dense"], "after": last, "better": "higher"}
    shares = {"before": 100 * scores["dense"], "after": 100 * last}
    return {"key": "score", "name": "top-1 accuracy", "unit": "%", **shares, "better": "higher", "on": on}


def _row(key: str, name: str, unit: str, before: Estimate, after: Estimate) -> dict[str, Any]:
    values = {"before": before.value, "before_error": before.error, "after": after.value, "after_error": after.error}
    return {"key": key, "name": name, "unit": unit, **values, "better": "lower", "remains": after.value / before.value}


def _count(key: str, name: str, before: int, after: int) -> dict[str, Any]:
    values = {"before": before, "after": after, "better": "lower", "remains": after / max(1, before), "how": "counted"}
    return {"key": key, "name": name, "unit": "", **values}


def _limits(work: Work) -> tuple[Limit, ...]:
    return limits_of(work.space, work.budget, work.budgeted)


def _budget(work: Work, row: Mapping[str, Any], limits: Mapping[str, Limit]) -> dict[str, Any]:
    """The budget of a row: a share of what was measured, where something was."""
    limit = limits.get(row["key"])
    if limit is None:
        return {}
    wanted = work.recipe.budget[row["key"]]
    share = limit.budget / limit.prices.dense * work.left(row["key"])
    if not is_share(wanted):
        return {"budget": limit.budget}
    return {"budget": share * row["before"], "budget_error": share * (row.get("before_error") or 0.0)}


def _verdict(work: Work, rows: list[dict[str, Any]]) -> dict[str, Any]:
    budgets = [_held(row) for row in rows if "budget" in row]
    known = {budget["name"] for budget in budgets}
    for limit in _limits(work):  # a count that has no row of its own
        if limit.prices.quantity not in known:
            after = cost_under(work, limit, work.plan)
            row = {"key": limit.prices.quantity, "unit": limit.prices.unit, "budget": limit.budget, "after": after}
            budgets.append(_held(row | {"how": "counted"}))
    met = all(budget["met"] for budget in budgets)
    return {"met": met, "text": _text(rows), "budgets": budgets}


def _held(row: Mapping[str, Any]) -> dict[str, Any]:
    doubt = (row.get("after_error") or 0.0) + (row.get("budget_error") or 0.0)
    slack = doubt if row["how"] == "measured" else 1e-9 * row["budget"]
    values = {"budget": row["budget"], "after": row["after"], "met": row["after"] <= row["budget"] + slack}
    return {"name": row["key"], "unit": row["unit"], **values, "how": row["how"]}


def _text(rows: list[dict[str, Any]]) -> str:
    """The verdict in one sentence."""
    by = {row["key"]: row for row in rows}
    budgeted = [row for row in rows if "budget" in row and row["key"] in ("latency", "energy", "macs")]
    cost = budgeted[0] if budgeted else by.get("latency") or by["macs"]
    times = f"{cost['before'] / cost['after']:.2f} times"
    fast = {"latency": f"{times} as fast", "energy": f"{times} less energy", "macs": f"{times} fewer multiply-adds"}
    text = f"{fast[cost['key']]} ({cost['remains']:.1%} of the {cost['name'].partition(',')[0]} remain)"
    score = by.get("score")
    if score is None:
        return text
    change = score["after"] - score["before"]
    if abs(change) < 0.005:
        return f"{text} and as good as the original ({score['name']} {score['after']:.4g}{score['unit']})"
    way = "above" if change > 0 else "below"
    if score["unit"] == "%":
        return f"{text} at {score['after']:.2f}% top-1, {abs(change):.2f} points {way} the original"
    return f"{text} at {score['name']} {score['after']:.4g}, {abs(change):.3g} {way} the original"


def _params(work: Work) -> int:
    """What the network at the end really has: biases between factors are not in the plan's count."""
    return sum(parameter.numel() for parameter in work.saved(finished(work)).parameters())


def _prediction(work: Work, latency: Pair | None) -> dict[str, Any] | None:
    """What the table said of whole networks, and what the clock did."""
    model = work.costs.get("latency")
    if not isinstance(model, NetworkCost):
        return None
    points = []
    for number, timing in enumerate(NetworkTimings.load(work.file(NETWORKS)).timings):
        said = model.of(timing.plan)
        name = "dense" if not timing.plan.changes() else f"random plan {number}"
        points.append(_point(name, said, Estimate(timing.latency_ms, timing.iqr_ms / 2), "fitted"))
    checks = work.json(CHECKS)["checks"] if work.file(CHECKS).exists() else []
    for number, check in enumerate(checks, start=1):
        said = Estimate(check["predicted_ms"], model.error * check["predicted_ms"])
        points.append(_point(f"choice {number}", said, Estimate(check["latency_ms"], check["error_ms"]), "result"))
    narrowed = next((timing for timing in model.timings if not timing.plan.changes()), None)
    if work.by_clock and narrowed is not None:
        measured = Estimate(narrowed.latency_ms, narrowed.iqr_ms / 2)
        points.append(_point("narrowed, by its widths", _by_widths(work), measured, "result"))
    if latency is not None:
        points.append(_point("the result", model.of(work.plan), latency[1], "result"))
    return {"unit": model.unit, "error": model.error, "points": points}


def _by_widths(work: Work) -> Estimate:
    """What the narrowed network was to take when its widths were chosen by the clock."""
    outcome = work.json(OUTCOME)
    return Estimate(outcome["latency_ms"], outcome["error_ms"])


def _point(name: str, predicted: Estimate, measured: Estimate, role: str) -> dict[str, Any]:
    values = {"predicted": predicted.value, "error": predicted.error, "measured": measured.value}
    return {"name": name, **values, "measured_error": measured.error, "role": role}


def _stages(work: Work) -> list[dict[str, Any]]:
    stages = work.json(FILE)["stages"]
    return [{"name": name, "seconds": stamp["seconds"]} for name, stamp in stages.items() if stamp["done"]]


def _target(work: Work) -> dict[str, Any]:
    target, table = work.target, work.table
    assert target is not None
    assert table is not None
    return {"name": str(target), **target.to_dict(), "device": table.environment.get("device", target.device)}


def _environment(work: Work) -> dict[str, Any]:
    found: dict[str, Any] = {"haloc": __version__, "torch": torch.__version__, "python": platform.python_version()}
    target = work.timed_here
    if target is not None:
        found |= environment(target.to_dict())
    return {"system": platform.platform(terse=True)} | found


def _notes(work: Work, rows: list[dict[str, Any]]) -> list[str]:
    """What a reader should know besides."""
    notes = []
    evidence = work.evidence
    if evidence is not None and not evidence.finished:
        notes.append(f"The search by method {evidence.method!r} was stopped by its time limit before its end.")
    told = finetune_facts(work)
    if told is not None and work.recipe.teacher.name is not None:
        notes.append(f"In the fine-tuning it learned from {work.recipe.teacher.name}, not from the dense network.")
    if told is not None and work.job.lessons is not None:
        notes.append("It was fine-tuned on the held-out images too, by which its ranks were chosen.")
    if work.by_clock:
        said, dense = _by_widths(work), work.json(OUTCOME)["dense_ms"]
        notes.append(
            f"Widths were chosen by the target's clock: the narrowed network is predicted to take {said.value:.3g} ± "
            f"{said.error:.2g} ms, {said.value / dense:.1%} of the dense network's {dense:.3g} ms."
        )
    if untrained(work):
        notes.append("Nothing was trained: there were no training data.")
    if work.target is not None and work.timed_here is None and work.target.device != "asic":
        notes.append("Latencies are predicted from a table of another machine; nothing was timed here.")
    slower = _slower(work)
    if slower:
        notes.append(f"These layers are slower on the target, as the plan has them, than dense: {', '.join(slower)}.")
    if not any(row["key"] == "score" for row in rows):
        notes.append("Nothing says how good the network is: give test data, or a score.")
    return notes


def _layer_facts(work: Work) -> list[dict[str, Any]]:
    return layer_facts(work.layers, work.space, work.plan, work.costs.get("latency"), work.original)


def _slower(work: Work) -> list[str]:
    rows = _layer_facts(work)
    return [row["name"] for row in rows if row["latency_ms"] and row["latency_ms"][1] > row["latency_ms"][0]]
