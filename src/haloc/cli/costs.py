"""What ``--budget`` and ``--cost`` say, as `haloc.search` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from haloc.cli.measure import network_file
from haloc.cli.output import note
from haloc.errors import SpecError

if TYPE_CHECKING:
    from haloc.cost.model import CostModel
    from haloc.cost.network import NetworkCost
    from haloc.cost.table import Table
    from haloc.inventory import Inventory, LayerInfo
    from haloc.methods.budget import Budget, Costs
    from haloc.space import LayerChoices, RankSpace

BudgetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--budget",
        "-b",
        help="What may remain: 60% or 0.6 of the cost, '4 ms', 12M; of several each with its name, as in macs=28%. "
        "Multiply-adds, unless there is a --cost.",
        show_default=False,
    ),
]
CostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--cost",
        help="A table that `haloc measure` wrote, networks beside it; its cost is called latency (or energy). Of "
        "several each with a name of its own, as in phone=phone.json.",
        show_default=False,
    ),
]


def read_budgets(texts: list[str] | None) -> Budget:
    """One budget, or several by the names of their costs; plain numbers are numbers, as they are in Python."""
    if not texts:
        raise SpecError(
            "how small is it to become? Give a budget, such as --budget 60%, or several by name: "
            "--budget macs=28% --budget params=24%"
        )
    named = {name.strip(): _amount(value) for name, equals, value in (text.partition("=") for text in texts) if equals}
    if len(named) == len(texts):
        return named
    if len(texts) == 1:
        return _amount(texts[0])
    raise SpecError(f"of several budgets each needs a name of its own, as in macs=28%, params=24%; got {_list(texts)}")


def read_tables(texts: list[str] | None) -> dict[str, Path]:
    """The files of the costs, by the names that they were given; without one a table is called latency."""
    found: dict[str, Path] = {}
    for text in texts or ():
        name, equals, path = text.partition("=")
        named = bool(equals) and not Path(text).exists()
        key, file = (name.strip(), Path(path)) if named else ("latency", Path(text))
        if key in found:
            raise SpecError(f"there are two costs called {key!r}; give each a name of its own, as in phone={file.name}")
        found[key] = file
    return found


def costs_on(space: RankSpace, tables: Mapping[str, Path], budget: Budget) -> Costs:
    """The costs that the budgets are held against: the only one, or all of them by name."""
    models = _models(space, tables)
    if isinstance(budget, Mapping):
        return models
    if len(tables) > 1:
        raise SpecError(f"there are several costs; give each a budget by its name, as in {next(iter(tables))}=60%")
    return models[next(iter(tables))] if tables else None


def cost_named(space: RankSpace, tables: Mapping[str, Path], name: str | None) -> CostModel | NetworkCost:
    """The one cost of that name; the only table there is, or multiply-adds, where none is named."""
    from haloc.cost.count import Count

    models = _models(space, tables)
    if name is None and len(tables) > 1:
        raise SpecError(f"there are several costs; say with --over which one is meant: {', '.join(models)}")
    chosen = name or next(iter(tables), "macs")
    return models[chosen] if chosen in models else Count(chosen)


def fine_table(tables: Mapping[str, Path]) -> Table:
    """The one table whose ranks are on offer, for ``--round-to auto``."""
    from haloc.cost.table import Table

    if len(tables) != 1:
        raise SpecError("--round-to auto takes the ranks from a table of many; give that one with --cost")
    return Table.load(next(iter(tables.values())))


def _models(space: RankSpace, tables: Mapping[str, Path]) -> dict[str, CostModel | NetworkCost]:
    """What every table knows; one of an accelerator has energies besides, called energy."""
    from haloc.cost.predict import completed
    from haloc.cost.table import Table

    found: dict[str, CostModel | NetworkCost] = {}
    for name, path in tables.items():
        table = Table.load(path)
        found[name] = _model(space, table, path)
        if table.target.device == "asic":
            found["energy" if name == "latency" else f"{name}-energy"] = completed(table.of("energy"))
    return found


def _model(space: RankSpace, table: Table, path: Path) -> CostModel | NetworkCost:
    """A whole network's cost where some were timed, as for `haloc predict`; else the layers' sum."""
    from haloc.cost.network import NetworkCost, NetworkTimings
    from haloc.cost.predict import completed

    rows, timings = completed(table), network_file(path)
    if not timings.exists():
        return rows
    note(f"latencies are those of whole networks, from {path} and {timings}")
    return NetworkCost(_inventory(space), rows, NetworkTimings.load(timings).timings)


def _inventory(space: RankSpace) -> Inventory:
    """The network as far as a space knows it: all that its cost depends on."""
    from haloc.inventory import Inventory

    layers = tuple(_layer(name, choices) for name, choices in space.layers.items())
    outside = (space.outside.get(name, 0) for name in ("macs", "params"))
    totals = (sum(layer.macs for layer in layers), sum(layer.params for layer in layers))
    return Inventory(layers, *(own + rest for own, rest in zip(totals, outside, strict=True)))


def _layer(name: str, choices: LayerChoices) -> LayerInfo:
    from haloc.inventory import LayerInfo

    macs = sum(call.macs for call in choices.calls)
    return LayerInfo(name, "", choices.calls, choices.calls[0].params, macs)


def _amount(text: str) -> float | str:
    """A plain number as one, so that 0.6 is a share; everything else as it is."""
    try:
        return float(text)
    except ValueError:
        return text


def _list(texts: list[str]) -> str:
    return ", ".join(map(repr, texts))
