"""``haloc predict``: how long a network takes under a plan, from a table and, if asked, from the clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table as RichTable

from haloc.cli.inspect import InputOption
from haloc.cli.measure import network_file
from haloc.cli.options import JsonOption, ModelArgument, WeightsOption, example_inputs, make_model
from haloc.cli.output import count, counting, note, print_json, print_table

if TYPE_CHECKING:
    from haloc.cost.model import CostModel, Estimate
    from haloc.cost.table import Table
    from haloc.inventory import Inventory
    from haloc.plan import Plan

PlanOption = Annotated[Path, typer.Option(help="The plan.", show_default=False)]
TableOption = Annotated[Path, typer.Option(help="The table that `haloc measure` wrote, networks beside it.")]
#: A machine that differs by less from what it was goes at the same pace.
_SAME_PACE = 0.02

MeasureOption = Annotated[bool, typer.Option("--measure", help="Also time both networks on the table's target, here.")]


def run(
    model: ModelArgument,
    plan: PlanOption,
    table: TableOption = Path("table.json"),
    weights: WeightsOption = None,
    inputs: InputOption = None,
    measure: MeasureOption = False,
    json: JsonOption = False,
) -> None:
    """Say what a plan brings on a target: latency (or energy) with an error bar, MACs, parameters.

    Examples:
    - `haloc predict resnet18 --plan plan.json --table table.json`

    - `haloc predict resnet18 --plan plan.json --table table.json --measure`
    """
    from haloc.cost.table import Table
    from haloc.factor.inspect import inspect
    from haloc.plan import Plan

    rows, chosen = Table.load(table), Plan.load(plan)
    network, example = make_model(model, weights), example_inputs(model, inputs or [])
    layers = inspect(network, example)
    layers.check(chosen)
    result: dict[str, Any] = {"model": model, "plan": str(plan), "target": str(rows.target)}
    result |= _counts(layers, chosen) | _predicted(layers, chosen, rows, table)
    if measure:
        result |= _measured(network, example, chosen, rows)
        result |= _at_this_pace(result)
    if json:
        print_json(result)
        return
    print_table(_table(result))
    for line in result["notes"]:
        note(line)


def _counts(layers: Inventory, plan: Plan) -> dict[str, Any]:
    return {
        "macs": {"dense": layers.macs, "plan": layers.macs_of(plan)},
        "params": {"dense": layers.params, "plan": layers.params_of(plan)},
    }


def _predicted(layers: Inventory, plan: Plan, table: Table, path: Path) -> dict[str, Any]:
    """Dense and plan as the table says; with timings of whole networks beside it, for whole networks."""
    from haloc.cost.model import layers_cost
    from haloc.cost.network import NetworkCost, NetworkTimings
    from haloc.cost.plans import known_of
    from haloc.cost.predict import Predictor

    file = network_file(path)
    rows, timings = known_of(layers, plan, table, NetworkTimings.load(file).timings if file.exists() else ())
    notes = [str(rows)] if isinstance(rows, Predictor) else []
    if timings:
        network = NetworkCost(layers, rows, timings)
        found: dict[str, Any] = {"latency_ms": {"dense": _pair(network.of({})), "plan": _pair(network.of(plan))}}
        then = next((timing.latency_ms for timing in timings if not timing.plan.changes()), None)
        found |= {} if then is None else {"then_ms": then}
    else:
        if table.target.device != "asic":
            notes.append(f"sum of the layers only: there is no {file} with timings of whole networks")
        sums = {name: layers_cost(layers, forms, rows) for name, forms in (("dense", {}), ("plan", plan))}
        found = {"latency_ms": {name: _pair(cost) for name, cost in sums.items()}}
    if table.target.device == "asic":
        energy = table.of("energy")
        found["energy_mj"] = {
            "dense": _pair(layers_cost(layers, {}, energy)),
            "plan": _pair(layers_cost(layers, plan, energy)),
        }
    notes += _slower(layers, plan, rows)
    return found | {"notes": notes}


def _slower(layers: Inventory, plan: Plan, rows: CostModel) -> list[str]:
    """Says which layers the plan makes slower than they are."""
    from haloc.forms import Dense

    worse = []
    for name, form in plan.changes().items():
        dense = sum(rows.price(call, Dense()).value for call in layers[name].calls)
        price = sum(rows.price(call, form).value for call in layers[name].calls)
        if price > dense:
            worse.append(f"{name} as {form} takes {price:.4f} {rows.unit}, dense {dense:.4f}: leave it dense")
    return worse


def _measured(network: Any, example: Any, plan: Plan, table: Table) -> dict[str, Any]:
    from haloc.cost.network import time_networks
    from haloc.plan import Plan

    plans = {"dense": Plan({}), "plan": plan}
    with counting(f"timing both networks on {table.target}") as on_progress:
        timings = time_networks(network, example, plans, table.target, on_progress=on_progress).timings
    pairs = {name: [timing.latency_ms, timing.iqr_ms / 2] for name, timing in zip(plans, timings, strict=True)}
    return {"measured_ms": pairs}


def _at_this_pace(result: dict[str, Any]) -> dict[str, Any]:
    """What is predicted, scaled to how fast the machine is now: by the dense network, which was timed then and now."""
    if "then_ms" not in result:
        return {}
    pace = result["measured_ms"]["dense"][0] / result["then_ms"]
    scaled = {name: [pace * value for value in pair] for name, pair in result["latency_ms"].items()}
    notes = list(result["notes"])
    if abs(pace - 1) > _SAME_PACE:
        more, slower = ("more", "slower") if pace > 1 else ("less", "faster")
        said = f"the dense network takes {abs(pace - 1):.1%} {more} than when the table was measured"
        notes.append(f"{said}: the machine is {slower} now")
    return {"paced_ms": scaled, "notes": notes}


def _pair(estimate: Estimate) -> list[float]:
    return [estimate.value, estimate.error]


def _table(result: dict[str, Any]) -> RichTable:
    shown = RichTable(title=f"{result['model']} by {result['plan']} on {result['target']}")
    shown.add_column("")
    for column in ("dense", "plan", "remains", "saving"):
        shown.add_column(column, justify="right", no_wrap=True)
    titles = {"latency_ms": "latency, predicted (ms)", "paced_ms": "… at the machine's pace now (ms)"}
    titles |= {"measured_ms": "latency, measured (ms)", "energy_mj": "energy, predicted (mJ)"}
    for key, title in titles.items():
        if key in result:
            (dense, dense_error), (plan, plan_error) = result[key]["dense"], result[key]["plan"]
            cells = (f"{dense:.3f} ± {dense_error:.3f}", f"{plan:.3f} ± {plan_error:.3f}")
            shown.add_row(title, *cells, f"{plan / dense:.1%}", f"{dense / plan:.2f}×")
    for key, title in (("macs", "MACs"), ("params", "parameters")):
        dense, plan = result[key]["dense"], result[key]["plan"]
        shown.add_row(title, count(dense), count(plan), f"{plan / dense:.1%}", f"{dense / plan:.2f}×")
    return shown
