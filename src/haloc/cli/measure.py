"""``haloc measure``: what every layer of a network costs on a target, as a table file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table as RichTable

from haloc.cli import complete
from haloc.cli.inspect import InputOption
from haloc.cli.options import JsonOption, OptionalModel, WeightsOption, example_inputs, make_model, was_given
from haloc.cli.output import counting, note, print_json, print_table
from haloc.errors import SpecError, nearest
from haloc.locks import file_at_work

if TYPE_CHECKING:
    from haloc.cost.measure import RowKey
    from haloc.cost.network import NetworkTimings
    from haloc.cost.predict import Predictor
    from haloc.cost.table import Table
    from haloc.cost.target import Target
    from haloc.inventory import Inventory
    from haloc.plan import Plan
    from haloc.shapes import Shape
    from haloc.space import RankSpace

TargetOption = Annotated[
    str,
    typer.Option(
        "--target",
        "-t",
        help="Where it is to run: device:runtime:precision:batch:layout:threads, all but the device optional and in "
        "any order, such as cuda:fp16:b128:compile, cpu:onnxruntime:b1:t2, cuda:graph:fp16:b128:nhwc, or eyeriss.",
        autocompletion=complete.target,
    ),
]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="The table file; rows already there are kept.")]
PlansOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--plan",
        help="Only what this plan needs: its layers dense and as it writes them, and networks between the dense one "
        "and it; repeat it for several.",
        show_default=False,
    ),
]
FormsOption = Annotated[str, typer.Option(help="Forms to measure: tucker2, tucker2-out, tucker2-in, spatial, svd.")]
RoundOption = Annotated[str, typer.Option(help="Ranks are multiples of this; 'paper' for its Algorithm 1.")]
UnequalOption = Annotated[bool, typer.Option("--unequal", help="All pairs of the two Tucker-2 ranks, not only equal.")]
LayerOption = Annotated[
    list[str] | None, typer.Option("--layer", help="Only this layer; repeat it for several.", show_default=False)
]
RowsOption = Annotated[
    str, typer.Option(help="Measure only so many rows, 20% or 25; a predictor fitted on them prices the others.")
]
NetworksOption = Annotated[
    int, typer.Option(min=0, help="Also time so many whole networks, so that plans can be predicted; 0: don't.")
]
HardwareOption = Annotated[
    list[str] | None,
    typer.Option(
        help="For eyeriss: a setting such as clock_mhz=250 or rows=24 (repeat it for several), or the YAML file of "
        "your own ZigZag accelerator.",
        show_default=False,
    ),
]
EngineOption = Annotated[str, typer.Option(help="For eyeriss: zigzag, timeloop, bound, or auto.")]
KitOption = Annotated[
    Path | None,
    typer.Option(help="Measure nothing; write a folder to be run on another machine instead.", show_default=False),
]
MergeOption = Annotated[
    list[Path] | None,
    typer.Option(help="A table file or kit folder to read into the output; repeat it for several.", show_default=False),
]
FigureOption = Annotated[
    Path | None,
    typer.Option(help="Draw the one --layer: a heat map of all pairs, else a staircase. .svg, .png or .pdf.",
                 show_default=False),
]  # fmt: skip

#: Options that say which rows to measure, as --plan does.
_CHOOSING = ("forms", "round_to", "unequal", "rows", "layer", "figure")


def run(
    context: typer.Context,
    model: OptionalModel = None,
    target: TargetOption = "cpu",
    output: OutputOption = Path("table.json"),
    weights: WeightsOption = None,
    inputs: InputOption = None,
    plan: PlansOption = None,
    forms: FormsOption = "tucker2,svd",
    round_to: RoundOption = "paper",
    unequal: UnequalOption = False,
    layer: LayerOption = None,
    rows: RowsOption = "100%",
    networks: NetworksOption = 9,
    hardware: HardwareOption = None,
    engine: EngineOption = "auto",
    figure: FigureOption = None,
    kit: KitOption = None,
    merge: MergeOption = None,
    json: JsonOption = False,
) -> None:
    """Measure what each layer costs in each form and rank on a target; writes table.json, resumable.

    Examples:
    - `haloc measure resnet18 --target cpu:onnxruntime:b1 --output table.json`

    - `haloc measure resnet18 --plan plan.json --target cpu:onnxruntime:b1 --output table.json`

    - `haloc measure resnet18 --target cuda:fp16:b128:compile --kit kit/` and, with what the kit wrote there,
      `haloc measure --merge kit/ --output table.json`
    """
    if plan:
        _refuse_others({name for name in (*_CHOOSING, "merge") if was_given(context, name)})
    if merge:
        table = _merged(merge, output, model)
        _show(table, _predictor(table, output), None, None, json)
        return
    if model is None:
        raise SpecError("which model? Name one (haloc measure resnet18), or tables to put together (--merge kit/)")
    from haloc.cost.target import Target
    from haloc.factor.inspect import inspect

    chosen = Target.parse(target)
    network, example = make_model(model, weights), example_inputs(model, inputs or [])
    layers = inspect(network, example)
    if plan:
        wanted, plans = _of_plans(layers, plan, networks)
    else:
        wanted, plans = _of_space(_space(layers, forms, round_to, unequal, layer), rows, networks)
    shape = _drawn(layers, figure, layer)
    if kit is not None:
        _write_kit(wanted, chosen, kit)
        return
    table = _measured(wanted, chosen, output, hardware or [], engine)
    timings = None
    if networks and not layer and chosen.device != "asic":
        timings = _timed(network, example, plans, chosen, network_file(output))
    if figure is not None and shape is not None:
        from haloc.report.figures import latency_figure

        latency_figure(table, shape, figure)
        note(f"drew {figure}")
    # All rows of a plan are measured, so there is nothing to predict them from.
    _show(table, None if plan else _predictor(table, output), layers, timings, json)


def _refuse_others(names: set[str]) -> None:
    """Refuses what would choose other rows than those of the plans."""
    if names:
        spelled = " and ".join(f"--{name.replace('_', '-')}" for name in sorted(names))
        raise SpecError(f"--plan says by itself which rows are measured: those of the plan; leave {spelled} out")


def network_file(table: Path) -> Path:
    """Where timings of whole networks lie: beside the table."""
    return table.with_suffix(".network.json")


def _space(layers: Inventory, forms: str, round_to: str, unequal: bool, names: list[str] | None) -> RankSpace:
    from haloc.space import rank_space

    step: int | str = int(round_to) if round_to.isdecimal() else round_to
    chosen = [form.strip() for form in forms.split(",") if form.strip()]
    space = rank_space(layers, forms=chosen, round_to=step, equal=not unequal, names=names)
    if names is None:
        return space
    return type(space)({name: choices for name, choices in space.layers.items() if name in names})


def _drawn(layers: Inventory, figure: Path | None, names: list[str] | None) -> Shape | None:
    """The layer to draw, known to be there before anything is measured."""
    if figure is None:
        return None
    if not names or len(names) != 1:
        raise SpecError("a figure shows one layer; name it with --layer, for example --layer layer1.0.conv1")
    return layers[names[0]].shape


def _of_plans(layers: Inventory, paths: list[Path], count: int) -> tuple[Sequence[RowKey], Mapping[str, Plan]]:
    """What is to be measured for these plans alone: rows and whole networks."""
    from haloc.cost.plans import plan_rows, plans_between
    from haloc.plan import Plan

    plans = [Plan.load(path) for path in paths]
    return plan_rows(layers, plans), plans_between(plans, count)


def _of_space(space: RankSpace, share: str, count: int) -> tuple[Sequence[RowKey], Mapping[str, Plan]]:
    """What is to be measured for all plans of a space."""
    from haloc.cost.network import sample_plans
    from haloc.cost.predict import choose_rows, parse_share

    rows = space.rows()
    chosen = rows if parse_share(share, len(rows)) == len(rows) else choose_rows(rows, share)
    return chosen, sample_plans(space, count)


def _write_kit(rows: Sequence[RowKey], target: Target, folder: Path) -> None:
    from haloc.cost.kit import write_kit

    write_kit(rows, target, folder)
    note(f"wrote {folder}/measure.py and {folder}/rows.json with {len(rows)} rows for {target}; run measure.py there, "
         f"then here: haloc measure --merge {folder} --output table.json")  # fmt: skip


def _merged(paths: list[Path], output: Path, model: str | None) -> Table:
    from haloc.cost.kit import merge_tables

    if model is not None:
        raise SpecError(f"--merge only reads tables, it takes no model; leave {model!r} out")
    with file_at_work(output):
        table = merge_tables([output, *paths] if output.exists() else paths)
        table.save(output)
    note(f"wrote {output}: {len(table)} rows for {table.target}")
    return table


def _measured(rows: Sequence[RowKey], target: Target, output: Path, settings: list[str], engine: str) -> Table:
    from haloc.cost.measure import measure

    with _resumable(output), counting(f"measuring {len(rows)} rows on {target}") as on_progress:
        table = measure(
            rows, target, path=output, hardware=_hardware(settings, target), engine=engine, on_progress=on_progress
        )
    note(f"wrote {output}: {len(table)} rows")
    return table


def _timed(network: Any, example: Any, plans: Mapping[str, Plan], target: Target, path: Path) -> NetworkTimings:
    from haloc.cost.network import time_networks

    with _resumable(path), counting(f"timing {len(plans)} whole networks") as on_progress:
        timings = time_networks(network, example, plans, target, path=path, on_progress=on_progress)
    note(f"wrote {path}: {len(timings.timings)} networks")
    return timings


@contextmanager
def _resumable(path: Path) -> Iterator[None]:
    """Says on Ctrl-C that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"stopped; what was measured is kept beside {path}, and the same command goes on from there")
        raise


def _hardware(settings: list[str], target: Target) -> Any:
    """Eyeriss with the settings given, or the user's own description."""
    if settings and target.device != "asic":
        raise SpecError(f"--hardware describes an accelerator; target {target} is none, use --target eyeriss")
    if len(settings) == 1 and "=" not in settings[0]:
        return Path(settings[0])
    from haloc.cost.eyeriss import Eyeriss

    known = {field.name: int if field.type == "int" else float for field in fields(Eyeriss)}
    given: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in known:
            raise SpecError(f"Eyeriss has no setting {name!r}; there are {', '.join(known)}.{nearest(name, known)}")
        try:
            given[name] = known[name](value)
        except ValueError as error:
            raise SpecError(f"{name} takes a {'whole ' * (known[name] is int)}number, got {value!r}") from error
    return Eyeriss(**given)


def _predictor(table: Table, output: Path) -> Predictor | None:
    """What can be predicted from the table, with its held-out error in a file beside it; None for very small tables."""
    from haloc.cost.predict import LEAST_ROWS, fit_predictor

    if len(table) < LEAST_ROWS:
        return None
    predictor = fit_predictor(table)
    predictor.save(output.with_suffix(".predictor.json"))
    return predictor


def _show(
    table: Table,
    predictor: Predictor | None,
    layers: Inventory | None,
    timings: NetworkTimings | None,
    json: bool,
) -> None:
    if json:
        print_json(_summary(table, predictor, layers, timings))
    else:
        print_table(_rich_table(table, layers))
        for line in _lines(table, predictor, layers, timings):
            note(line)


def _summary(
    table: Table, predictor: Predictor | None, layers: Inventory | None, timings: NetworkTimings | None
) -> dict[str, Any]:
    found: dict[str, Any] = table.to_dict() | {"predictor": predictor.to_dict() if predictor else None}
    if layers is not None and timings is not None:
        cost = _network_cost(table, predictor, layers, timings)
        found["network"] = {"dense_ms": cost.of({}).value, "relative_error": cost.error, "timed": len(timings.timings)}
    return found


def _network_cost(table: Table, predictor: Predictor | None, layers: Inventory, timings: NetworkTimings) -> Any:
    from haloc.cost.network import NetworkCost

    return NetworkCost(layers, predictor or table, timings.timings)


def _lines(
    table: Table, predictor: Predictor | None, layers: Inventory | None, timings: NetworkTimings | None
) -> Iterator[str]:
    noisy = sum(row.noisy for row in table.rows)
    if noisy:
        yield f"{noisy} of {len(table)} rows stayed noisy and are marked; an idle machine measures better"
    if predictor is not None:
        yield str(predictor)
    if layers is not None and timings is not None:
        cost = _network_cost(table, predictor, layers, timings)
        which = "a plan of these rows" if predictor is None else "any plan"
        yield (
            f"whole network, dense: {cost.of({}).value:.3f} ms; {which} can be predicted to within {cost.error:.1%} "
            f"(from {len(timings.timings)} networks timed)"
        )


def _rich_table(table: Table, layers: Inventory | None) -> RichTable:
    device = table.environment.get("device", "")
    shown = RichTable(title=f"{table.target} on {device}: {len(table)} rows")
    for column in ("layer", "times"):
        shown.add_column(column, overflow="fold")
    for column in ("rows", f"dense {table.unit}", "fastest", table.unit, "speed"):
        shown.add_column(column, justify="right", no_wrap=True)
    for shape, names in _shapes(table, layers).items():
        shown.add_row(*_cells(table, shape, names))
    return shown


def _shapes(table: Table, layers: Inventory | None) -> dict[Shape, list[str]]:
    """The table's layers, with the names that they have in the network where there is one."""
    from haloc.shapes import as_deployed

    found: dict[Shape, list[str]] = {row.shape: [] for row in table.rows}
    for layer in layers or ():
        for call in layer.calls:
            found.setdefault(as_deployed(call), []).append(layer.name)
    return {shape: names for shape, names in found.items() if table.forms_of(shape)}


def _cells(table: Table, shape: Shape, names: list[str]) -> tuple[str, ...]:
    from haloc.cost.measure import label
    from haloc.forms import Dense

    rows = table.forms_of(shape)
    name = names[0] if names else label(shape)
    if Dense() not in rows:
        return (name, str(len(names) or ""), str(len(rows)), "", "", "", "")
    dense, best = table.price(shape, Dense()).value, table.fastest(shape)
    price = table.price(shape, best).value
    mark = " ~" if rows[best].noisy or rows[Dense()].noisy else ""
    speed = f"{dense / price:.2f}×{mark}"
    return (name, str(len(names) or ""), str(len(rows)), f"{dense:.4f}", str(best), f"{price:.4f}", speed)
