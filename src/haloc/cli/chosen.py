"""What is said of ranks that were chosen: a line per layer, a line per budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from haloc.cli.output import count, print_json, print_table
from haloc.forms import Dense, form_from_dict, form_to_dict

if TYPE_CHECKING:
    from haloc.cost.model import CostModel
    from haloc.forms import Form
    from haloc.methods.budget import Costs
    from haloc.methods.search import SearchResult
    from haloc.space import LayerChoices


def describe_result(result: SearchResult, cost: Costs) -> dict[str, Any]:
    """A result as plain JSON values."""
    rows = [
        {"name": row.quantity, "unit": row.unit, "cost": row.cost, "budget": row.budget, "dense": row.dense}
        | {"remains": row.remains, "saved": 1 - row.remains}
        for row in result.spending
    ]
    models = dict(_models([row.quantity for row in result.spending], cost))
    offers = result.evidence.space.open_layers
    layers = {name: _layer(offer, result.plan.get(name, Dense()), models) for name, offer in offers.items()}
    return {"method": result.evidence.method, "finished": result.finished, "budgets": rows, "layers": layers}


def show_result(described: Mapping[str, Any], title: str, json: bool) -> None:
    """Prints it, for people or for programs."""
    if json:
        print_json(described)
        return
    names = [row["name"] for row in described["budgets"]]
    table = Table(title=title)
    table.add_column("layer", overflow="fold")
    table.add_column("form", no_wrap=True)
    for name in names:
        table.add_column(f"{name} left", justify="right", no_wrap=True)
    for layer, row in described["layers"].items():
        table.add_row(layer, str(form_from_dict(row["form"])), *(f"{row['remains'][name]:.1%}" for name in names))
    print_table(table)
    print_table(_budgets(described["budgets"]))


def amount(value: float, unit: str) -> str:
    """A cost as people read it."""
    return f"{value:.4g} {unit}" if unit else count(round(value))


def _budgets(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    for column in ("budget", "costs", "may cost", "dense", ""):
        table.add_column(column, justify="left" if column == "budget" else "right", no_wrap=True)
    for row in rows:
        cells = (amount(row[name], row["unit"]) for name in ("cost", "budget", "dense"))
        table.add_row(row["name"], *cells, f"{row['remains']:.1%} remain, {row['saved']:.1%} saved")
    return table


def _models(names: list[str], cost: Costs) -> Iterator[tuple[str, CostModel]]:
    """What prices a layer under each budget: of a network's cost, its rows."""
    from haloc.cost.count import Count
    from haloc.cost.network import NetworkCost

    for name in names:
        model = cost.get(name) if isinstance(cost, Mapping) else cost
        own = Count(name) if model is None else model
        yield name, own.rows if isinstance(own, NetworkCost) else own


def _layer(offer: LayerChoices, form: Form, models: Mapping[str, CostModel]) -> dict[str, Any]:
    remains = {name: _price(offer, form, model) / _price(offer, Dense(), model) for name, model in models.items()}
    return {"form": form_to_dict(form), "remains": remains}


def _price(offer: LayerChoices, form: Form, model: CostModel) -> float:
    return sum(model.price(call, form).value for call in offer.calls)
