"""Tables of what was measured, for a terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from bars import (
    GOALS,
    HERE,
    LATER,
    NOT_MEASURED,
    PAPER,
    Bar,
    Run,
    bars_of,
    earlier,
    final_of,
    found,
    lead_of,
    percent,
    runs_of,
    screened,
)
from rich.table import Table
from rich.text import Text

from haloc.cost.count import Count
from haloc.factor.inspect import inspect
from haloc.inventory import Inventory
from haloc.methods.evidence import Evidence
from haloc.pipeline.recipe import Recipe
from haloc.pipeline.recipe_file import read_recipe
from haloc.plan import Plan
from haloc.zoo import create

MODELS = {"resnet20": "resnet20", "vgg16": "vgg16_bn_cifar"}
_VERDICTS = {True: "[green]held[/]", False: "[red]MISSED[/]", None: "[yellow]open[/]"}


@dataclass(frozen=True)
class Sheet:
    """A table.

    Attributes:
        title: What it is of.
        columns: Their names; the first ``left`` are words, the others figures.
        rows: Cells, with rich's markup in them.
        left: How many columns are words.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]] = field(default_factory=list)
    left: int = 1

    @property
    def table(self) -> Table:
        """For a terminal."""
        table = Table(title=self.title, title_justify="left")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number < self.left else "right")
        for row in self._lines:
            table.add_row(*row)
        return table

    @property
    def markdown(self) -> str:
        """For the page, without markup of the terminal; the title is the page's own."""
        rules = ["---" if number < self.left else "--:" for number in range(len(self.columns))]
        rows = [[Text.from_markup(cell).plain for cell in row] for row in self._lines]
        lines = [self.columns, rules, *([*row, *[""] * (len(self.columns) - len(row))] for row in rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    @property
    def _lines(self) -> Sequence[Sequence[str]]:
        return self.rows or [(NOT_MEASURED,)]


def sheets_of(folder: Path) -> dict[str, Sheet]:
    """All tables by the names that the page has for them."""
    results = folder / "results"
    sheets = {"bars": bars_sheet(bars_of(folder))}
    for network, goal in GOALS.items():
        path = results / f"{network}-methods.json"
        title = f"{goal.title}, methods by one recipe{_for_epochs((found(path) or {}).get('epochs'))}"
        sheets[network] = side_by_side(folder, network)
        sheets[f"{network}-methods"] = methods_sheet(runs_of(path, network), title)
    runs, epochs = screened(folder, "vgg16")
    sheets["vgg16-screen"] = methods_sheet(runs, f"VGG-16, all methods, one seed{_for_epochs(epochs)}")
    runs, epochs = earlier()
    sheets["earlier"] = methods_sheet(runs, f"ResNet-20 at 28% and 24%, an earlier comparison{_for_epochs(epochs)}")
    sheets["flow"] = flow_sheet(found(results / "flow.json") or {})
    sheets["latency"] = latency_sheet((found(results / "latency.json") or {}).get("rows", []))
    return sheets | {"recipes": recipes_sheet(), "searches": searches_sheet(folder), "plans": plans_sheet(folder)}


def _for_epochs(epochs: int | None) -> str:
    return f", {epochs} epochs" if epochs else ""


# --- results ------------------------------------------------------------------------------------------------------


def bars_sheet(bars: Iterable[Bar]) -> Sheet:
    rows = [(bar.text, bar.figure, _VERDICTS[bar.held]) for bar in bars]
    return Sheet("bars", ("bar", "measured", "verdict"), rows, left=3)


def side_by_side(folder: Path, network: str) -> Sheet:
    """The paper's rows, then ours."""
    quoted = {name: ("paper", row) for name, row in PAPER[network].items()}
    quoted |= {name: ("its authors", row) for name, row in LATER.get(network, {}).items()}
    rows = [(name, source, *map(_or_dash, row), "") for name, (source, row) in quoted.items()]
    columns = ("network", "from", "top-1 %", "multiply-adds fewer %", "parameters fewer %", "seeds")
    return Sheet(f"{GOALS[network].title} on CIFAR-10", columns, [*rows, *our_rows(folder, network)], left=2)


def our_rows(folder: Path, network: str) -> list[Sequence[str]]:
    base = (found(folder / "results" / "bases.json") or {}).get(network)
    top1 = f"{percent(base['top1']):.2f}" if base else NOT_MEASURED
    run = final_of(folder, network)
    missing = ("HALOC", "here", NOT_MEASURED, "", "", "")
    return [("uncompressed", "here", top1, "–", "–", ""), missing if run is None else _our_row("HALOC", run)]


def _our_row(name: str, run: Run) -> Sequence[str]:
    fewer = (f"{100 * (1 - left):.2f}" for left in (run.macs, run.params))
    seeds = ", ".join(f"{value:.2f}" for value in run.values)
    return (name, "here", run.said.removesuffix("%"), *fewer, seeds)


def _or_dash(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def methods_sheet(runs: Mapping[str, Run], title: str) -> Sheet:
    """The best first, each with how far HALOC's plan is ahead of it."""
    own = runs.get("haloc")
    rows = [
        (
            run.name,
            run.said,
            f"{run.macs:.2%}",
            f"{run.params:.2%}",
            ", ".join(f"{value:.2f}" for value in run.values),
            "" if own is None or run is own else lead_of(own, run),
        )
        for run in sorted(runs.values(), key=lambda run: -run.top1)
    ]
    columns = ("method", "top-1", "multiply-adds left", "parameters left", "seeds", "HALOC ahead by")
    return Sheet(title, columns, rows)


def flow_sheet(flow: Mapping[str, Any]) -> Sheet:
    """Seconds of every stage."""
    stages = list(dict.fromkeys(stage for row in flow.values() for stage in row["stages"]))
    rows = [(stage, *(_seconds(flow, network, stage) for network in GOALS)) for stage in stages]
    totals = [f"{sum(flow[network]['stages'].values()):.1f}" if network in flow else NOT_MEASURED for network in GOALS]
    titles = [goal.title for goal in GOALS.values()]
    return Sheet("seconds of the whole flow on the GPU", ("stage", *titles), [*rows, ("all", *totals)])


def _seconds(flow: Mapping[str, Any], network: str, stage: str) -> str:
    seconds = flow.get(network, {}).get("stages", {}).get(stage)
    return "–" if seconds is None else f"{seconds:.1f}"


def latency_sheet(rows: Sequence[Mapping[str, Any]]) -> Sheet:
    """Three networks on every target."""
    dense = {(row["network"], row["target"]): row["latency_ms"] for row in rows if row["plan"] == "dense"}
    lines = [
        (
            row["network"],
            row["target"],
            row["plan"] + " (nothing changed)" * (row["plan"] != "dense" and row.get("changed") == 0),
            f"{row['latency_ms']:.4f} ± {row.get('error_ms', 0.0):.4f}",
            _times(dense.get((row["network"], row["target"])), row["latency_ms"]),
            NOT_MEASURED if row.get("top1") is None else f"{percent(row['top1']):.2f}%",
            f"{row['macs']:.2%}",
            f"{row['params']:.2%}",
        )
        for row in rows
    ]
    columns = ("network", "target", "budget", "ms", "speed", "top-1", "multiply-adds left", "parameters left")
    return Sheet("budgets of latency and of multiply-adds", columns, lines, left=3)


def _times(dense: float | None, own: float) -> str:
    return "–" if dense is None else f"{dense / own:.2f}×"


# --- recipes, and what was made by them ---------------------------------------------------------------------------


def recipes_sheet() -> Sheet:
    """What the recipes of the two networks say, as far as the paper is compared with it."""
    recipes = [read_recipe(HERE / f"{network}-haloc.toml") for network in GOALS]
    rows = [(name, *map(said, recipes)) for name, said in _SAID.items()]
    return Sheet("recipes", ("recipe", *(goal.title for goal in GOALS.values())), rows, left=3)


def _offer(recipe: Recipe) -> str:
    space = recipe.space
    return (
        _step(space.round_to)
        + ", equal for both modes" * space.equal
        + ", only what a budget can pay" * space.affordable
    )


def _step(step: int | str) -> str:
    return "by the paper's step list" if step == "paper" else f"multiples of {step}"


def _told(values: Mapping[str, Any]) -> str:
    """As a recipe has it, without quotes."""
    shown = {name: str(value).lower() if isinstance(value, bool) else value for name, value in values.items()}
    return ", ".join(f"{name} = {value}" for name, value in shown.items()) or "the defaults"


def _finetuning(recipe: Recipe) -> str:
    told = {"batch_size": recipe.data.batch_size, **recipe.finetune}
    told.pop("evaluate_every", None)
    return _told(told)


def _images(recipe: Recipe) -> str:
    return "all training images" if recipe.data.whole else "training images but those that ranks are chosen by"


#: What is told of a recipe.
_SAID = {
    "forms on offer": lambda recipe: ", ".join(recipe.space.forms),
    "ranks on offer": _offer,
    "search": lambda recipe: _told(recipe.search.settings),
    "training while searching": lambda recipe: _told(recipe.search.training),
    "fine-tuning": _finetuning,
    "fine-tuned on": _images,
    "taught by": lambda recipe: recipe.teacher.name or "the uncompressed network",
}


def searches_sheet(folder: Path) -> Sheet:
    """HALOC's searches that are committed, with what they were told."""
    rows = [_search_row(folder, network) for network in GOALS if searched(folder, network)]
    columns = ("search", "ranks on offer", "told", "trained", "seconds", "recipe")
    return Sheet("HALOC's searches on the H200", columns, rows, left=6)


def searched(folder: Path, network: str) -> Evidence | None:
    """What HALOC's search found, where there was one."""
    path = folder / "search" / f"{network}-haloc.json"
    return Evidence.load(path) if path.is_file() else None


def _search_row(folder: Path, network: str) -> Sequence[str]:
    name = f"{network}-haloc"
    made = made_of(folder).get(name)
    if made is None:
        return (GOALS[network].title, "–", "–", "–", "–", "–")
    recipe = _recipe(made)
    told = (_offer(recipe), _told(recipe.search.settings), _told(recipe.search.training))
    return (GOALS[network].title, *told, seconds_said(made), _which(name, made))


def made_of(folder: Path) -> dict[str, Any]:
    """How the plans were made, by their names."""
    return found(folder / "plans" / "made.json") or {}


def seconds_said(made: Mapping[str, Any]) -> str:
    """Seconds of the search, and what they are worth."""
    if "seconds" not in made:
        return "–"
    beside = f", {made['beside']} other networks trained beside it" if made["beside"] else ", nothing beside it"
    return f"{made['seconds']:.1f}{beside}"


def _recipe(made: Mapping[str, Any]) -> Recipe:
    return Recipe.from_dict({"space": made["space"], "search": made["search"]})


def _which(name: str, made: Mapping[str, Any]) -> str:
    """Whether the recipe of that name would do the same today."""
    path, then = HERE / f"{name}.toml", _recipe(made)
    now = read_recipe(path) if path.is_file() else None
    return "as it is now" if now and (now.space, now.search) == (then.space, then.search) else "an earlier one"


def plans_sheet(folder: Path) -> Sheet:
    """All committed plans with what they leave of the network."""
    made = made_of(folder)
    rows = [row for network in GOALS for row in _plan_rows(folder, network, made)]
    columns = ("network", "method", "chosen on", "ranks", "recipe", "multiply-adds left", "parameters left")
    return Sheet("plans", columns, rows, left=5)


def _plan_rows(folder: Path, network: str, made: Mapping[str, Any]) -> list[Sequence[str]]:
    paths = sorted((folder / "plans").glob(f"{network}-*.json"))
    return [
        (
            GOALS[network].title,
            path.stem.removeprefix(f"{network}-"),
            *_making(path.stem, made.get(path.stem)),
            *(f"{share:.2%}" for share in shares_of(Plan.load(path), layers_of(network))),
        )
        for path in paths
    ]


def _making(name: str, made: Mapping[str, Any] | None) -> Sequence[str]:
    if made is None:
        return ("–", "–", "–")
    device = {"cuda": "H200", "cpu": "CPU"}.get(made["device"], made["device"])
    return (device, _step(made["space"]["round_to"]), _which(name, made))


def shares_of(plan: Plan, layers: Inventory) -> tuple[float, float]:
    """What is left of multiply-adds and parameters, with the biases that BatchNorms between factors leave."""
    plain, biased = Count("params"), Count("params", biased=True)
    biases = sum(
        biased.price(layers[name].shape, form).value - plain.price(layers[name].shape, form).value
        for name, form in plan.items()
    )
    return layers.macs_of(plan) / layers.macs, (layers.params_of(plan) + biases) / layers.params


@cache
def layers_of(network: str) -> Inventory:
    """The layers of the uncompressed network."""
    return inspect(create(MODELS[network]), torch.zeros(1, 3, 32, 32))
