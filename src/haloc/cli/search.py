"""``haloc search``: chooses the ranks of a network within a budget, anew or from what an earlier search found."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from haloc.cli import complete
from haloc.cli.chosen import describe_result, show_result
from haloc.cli.costs import BudgetOption, CostOption, costs_on, read_budgets, read_tables
from haloc.cli.groups import Group, grouped
from haloc.cli.inspect import InputOption
from haloc.cli.methods import (
    GeneticGroup,
    GeneticOptions,
    HalocGroup,
    HalocOptions,
    LcGroup,
    LcOptions,
    RandomGroup,
    RandomOptions,
    SensitivityGroup,
    SensitivityOptions,
    settings_for,
)
from haloc.cli.options import DeviceOption, JsonOption, OptionalModel, WeightsOption, was_given
from haloc.cli.output import note
from haloc.cli.searching import (
    EVIDENCE,
    PLAN,
    Order,
    check_order,
    draw_search,
    left_alone,
    method_named,
    searched,
    training_for,
)
from haloc.cli.subject import SearchData, SpaceOptions
from haloc.cli.training import RESULT, RunOptions, SettingsGroup, running
from haloc.errors import SpecError
from haloc.files import write_json
from haloc.training.settings import TrainSettings

if TYPE_CHECKING:
    from haloc.methods.budget import Budget


@dataclass(frozen=True)
class Place:
    """Where it happens and what is told of it."""

    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="The folder of the search; with --from the file of the plan.", show_default=False
        ),
    ]
    device: DeviceOption = "cpu"
    resume: Annotated[bool, typer.Option(help="Go on from what is in the folder, if there is something.")] = True
    figures: Annotated[bool, typer.Option("--figures", help="Draw how the search went into the folder.")] = False
    json: JsonOption = False


MethodOption = Annotated[
    str,
    typer.Option(
        help="haloc, sensitivity, genetic, lc, alds, energy, vbmf, uniform or random.",
        autocompletion=complete.among(complete.METHODS),
    ),
]
ActivationsOption = Annotated[
    int, typer.Option(min=0, help="Look at what so many training images make of the layers' inputs; 0: don't.")
]
ResponsesOption = Annotated[
    bool,
    typer.Option(
        "--responses", help="Weigh errors of layers by what comes of them; for networks that are not trained again."
    ),
]
FromOption = Annotated[
    Path | None,
    typer.Option("--from", help="Choose again from the search.json of an earlier search.", show_default=False),
]
ParetoOption = Annotated[bool, typer.Option("--pareto", help="With --from: a plan for each of many budgets.")]
PointsOption = Annotated[int, typer.Option(min=2, help="With --pareto: how many budgets.")]
OverOption = Annotated[
    str | None,
    typer.Option(help="With --pareto: budgets of what: macs, params, latency, …", show_default=False),
]
SplitOption = Annotated[
    str, typer.Option(help="With --pareto, a model and --data: images to evaluate on, val or test.")
]

_DATA, _SPACE, _SETTINGS = SearchData(), SpaceOptions(), TrainSettings()
_HALOC, _SENSITIVITY, _GENETIC = HalocOptions(), SensitivityOptions(), GeneticOptions()
_LC, _RANDOM = LcOptions(), RandomOptions()

#: What can be said with --from, what with --pareto, and what with neither.
_AGAIN = {"source", "budget", "cost", "output", "json"}
_LATER = {"points", "over", "split"}
_PARETO = {"pareto", "source", "cost", "output", "json", "model", "weights", "device", "activations", *_LATER}
_PARETO |= {field.name for field in fields(SearchData)}
#: What has a meaning for methods that train alone, and what with images alone.
_TRAINING = {field.name for field in fields(TrainSettings)} - {"seed"}
_IMAGES = {"activations", "responses"} | {field.name for field in fields(SearchData)}
#: Options whose names are not those of their parameters.
_SPELLED = {"inputs": "input", "source": "from"}


@grouped
def run(
    context: typer.Context,
    place: Annotated[Place, Group("Run")],
    model: OptionalModel = None,
    budget: BudgetOption = None,
    cost: CostOption = None,
    method: MethodOption = "haloc",
    source: FromOption = None,
    pareto: ParetoOption = False,
    points: PointsOption = 12,
    over: OverOption = None,
    split: SplitOption = "val",
    weights: WeightsOption = None,
    inputs: InputOption = None,
    activations: ActivationsOption = 1000,
    responses: ResponsesOption = False,
    space: Annotated[SpaceOptions, Group("Ranks on offer")] = _SPACE,
    data: Annotated[SearchData, Group("Data")] = _DATA,
    settings: SettingsGroup = _SETTINGS,
    haloc: HalocGroup = _HALOC,
    sensitivity: SensitivityGroup = _SENSITIVITY,
    genetic: GeneticGroup = _GENETIC,
    lc: LcGroup = _LC,
    random: RandomGroup = _RANDOM,
) -> None:
    """Choose a form and ranks for every layer, within a budget; writes plan.json and search.json into a folder.

    Examples:
    - `haloc search resnet20 --weights pretrained --method energy --budget 60% --output runs/ranks`

    - `haloc search resnet20 --weights pretrained --budget macs=28% --budget params=24% --data cifar10 --epochs 60
      --device cuda --output runs/haloc` and, for another budget without searching again,
      `haloc search --from runs/haloc/search.json --budget 40% --output plan.json`

    - `haloc search --from runs/haloc/search.json --pareto --output runs/haloc/pareto`
    """
    given = {name for name in context.params if was_given(context, name)}
    if pareto:
        from haloc.cli.pareto import Curve, draw

        _refuse_others(given - _PARETO, "--pareto")
        curve = Curve(source, read_tables(cost), over, points, model, weights, data, split, activations)
        draw(curve, place.output, place.device, place.json)
    elif source is not None:
        if model is not None:
            raise SpecError(
                f"--from chooses again from what a search found, and needs no model; leave {model!r} out, or give "
                "--pareto and --data to evaluate networks"
            )
        _refuse_others(given - _AGAIN, "--from")
        _choose_again(source, read_budgets(budget), read_tables(cost), place)
    else:
        _refuse_others(given & _LATER, "a new search")
        wanted = read_budgets(budget)
        if model is None:
            raise SpecError(
                "which model? Name one (haloc search resnet20), or an earlier search (--from runs/a/search.json)"
            )
        chosen = method_named(method)
        if not chosen.trains:
            _refuse_others(given & _TRAINING, f"method {method!r}, which does not train")
        if data.data is None:
            _refuse_others(given & _IMAGES, "a search without --data")
        told = settings_for(chosen, (haloc, sensitivity, genetic, lc, random))
        training = training_for(chosen, settings, given)
        tables = read_tables(cost)
        seen = activations, responses
        _search(Order(model, weights, inputs or [], wanted, tables, chosen, told, space, data, training, *seen), place)


def _refuse_others(names: set[str], mode: str) -> None:
    """Refuses options that would be without effect."""
    if names:
        first = _SPELLED.get(min(names), min(names)).replace("_", "-")
        raise SpecError(f"--{first} has no meaning with {mode}; leave it out")


def _search(order: Order, place: Place) -> None:
    """A new search, or the rest of one."""
    check_order(order)
    if place.figures:
        from haloc.report.style import require_matplotlib

        require_matplotlib()
    started = time.perf_counter()
    with running("search", RunOptions(place.output, place.device, place.resume, json=place.json)) as here:
        with left_alone(here):
            result, cost = searched(order, here)
        described: dict[str, Any] = {"model": order.model, "data": order.data.data}
        described |= describe_result(result, cost) | {"seconds": time.perf_counter() - started}
        described |= {"plan": str(here.folder / PLAN), "search": str(here.folder / EVIDENCE)}
        if here.session.is_main:
            result.plan.save(here.folder / PLAN)
            result.evidence.save(here.folder / EVIDENCE)
            write_json(here.folder / RESULT, described)
            if place.figures:
                draw_search(result, here.folder)
        show_result(described, f"{order.model}: ranks by method {order.method.name}", place.json)
        note(f"wrote {PLAN} and {EVIDENCE} to {here.folder}")
        if not result.finished:
            note("the time is up; the same command with more --minutes, or without, goes on from here")


def _choose_again(source: Path, budget: Budget, tables: Mapping[str, Path], place: Place) -> None:
    """From what a search found, without searching."""
    from haloc.methods.evidence import Evidence
    from haloc.methods.search import solve

    evidence = Evidence.load(source)
    cost = costs_on(evidence.space, tables, budget)
    result = solve(evidence, budget, cost)
    result.plan.save(place.output)
    described = {"search": str(source)} | describe_result(result, cost) | {"plan": str(place.output)}
    show_result(described, f"ranks from {source}, method {evidence.method}", place.json)
    note(f"wrote {place.output}")
