"""A search from the command line: what was ordered, its folder, and the choice itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haloc.cli.costs import costs_on
from haloc.cli.output import counting, note, training_progress
from haloc.cli.subject import SearchData, SpaceOptions, calibrated, load_subject
from haloc.cli.training import CONFIG, Here
from haloc.errors import HalocError, SpecError
from haloc.files import read_json
from haloc.locks import LOCK
from haloc.training.settings import FREE, GENTLER, TrainSettings

if TYPE_CHECKING:
    from haloc.methods.budget import Budget, Costs
    from haloc.methods.search import SearchResult
    from haloc.methods.task import Method
    from haloc.space import RankSpace
    from haloc.training.run import Progress

PLAN, EVIDENCE = "plan.json", "search.json"
#: Methods that do not look at the weights.
_BLIND = ("uniform", "random")
#: What may differ when a search goes on; more generations follow on those that were bred.
_FREE = {*FREE, "kind", "format", "versions", "root", "generations"}


@dataclass(frozen=True)
class Order:
    """A search as the user wants it.

    Attributes:
        model: The name of the model.
        weights: Its weights, or None.
        inputs: What it is run on, as the user spelled it.
        budget: What the network may cost.
        tables: What costs are read from.
        method: Who chooses.
        told: The method's settings, or None.
        space: What it chooses from.
        data: What it looks at.
        training: How it trains, if it does.
        activations: Training images from which the layers' inputs are known.
        responses: Whether it is known, too, what comes of errors in their outputs.
    """

    model: str
    weights: Path | None
    inputs: list[str]
    budget: Budget
    tables: Mapping[str, Path]
    method: Method
    told: Any
    space: SpaceOptions
    data: SearchData
    training: TrainSettings
    activations: int
    responses: bool

    def describe(self) -> dict[str, Any]:
        """The command in full, as ``config.json`` has it; paths are what the user typed."""
        data = asdict(self.data)
        source = {"name": data.pop("data"), "root": data.pop("data_root"), **data}
        config: dict[str, Any] = {"command": "search", "model": self.model, "weights": self.weights}
        config |= {"inputs": self.inputs}
        config |= {"budget": self.budget, "cost": dict(self.tables), "space": asdict(self.space), "data": source}
        config |= {"method": self.method.name, "activations": self.activations, "responses": self.responses}
        config |= {self.method.name: None if self.told is None else asdict(self.told)}
        config |= {"settings": asdict(self.training) if self.method.trains else None}
        plain: dict[str, Any] = json.loads(json.dumps(config, default=str))
        return plain


def method_named(name: str) -> Method:
    """The method of that name."""
    from haloc.methods.search import method_of

    return method_of(name)


def check_order(order: Order) -> None:
    """Refuses a method without what it cannot do without."""
    from haloc.zoo.registry import entry_for

    name, entry = order.method.name, entry_for(order.model)
    if order.method.needs and order.data.data is None:
        raise SpecError(
            f"method {name!r} looks at images; say which with --data, for example --data cifar10, or take a method "
            "that needs none, such as --method energy"
        )
    if order.weights is None and entry is not None and name not in _BLIND:
        hint = "--weights pretrained" if entry.pretrained is not None else "--weights"
        raise SpecError(f"{order.model!r} alone has random weights; say where its trained ones are, with {hint}")


def searched(order: Order, here: Here) -> tuple[SearchResult, Costs]:
    """Loads what is needed, makes sure of the budget, and searches; returns also the costs that were read."""
    from haloc.factor.inspect import inspect
    from haloc.methods.search import search
    from haloc.training.checkpoint import Store

    config = order.describe()
    check_config(config, here)
    subject = load_subject(order.model, order.weights, order.inputs, order.data, order.training, here)
    images = subject.images
    space = order.space.over(inspect(subject.network, subject.example), order.tables)
    cost = costs_on(space, order.tables, order.budget)
    check_budget(space, order.budget, cost)
    moments = None
    if images is not None:
        names, looked = space.open_layers, order.activations
        moments = calibrated(subject.network, images.source, images.scale, names, looked, order.responses)
    here.begin(config, 1 if images is None else images.train.steps)
    if here.session.is_main and not here.options.resume:
        for name in (PLAN, EVIDENCE, "log.jsonl"):  # of an earlier search that is not gone on with
            (here.folder / name).unlink(missing_ok=True)
        Store(here.folder / "checkpoints").clear()
    with following(f"choosing ranks for {order.model} by method {order.method.name}") as (on_step, on_progress):
        result = search(
            subject.network,
            space,
            budget=order.budget,
            cost=cost,
            method=order.method,
            settings=order.told,
            train=None if images is None else images.train,
            val=None if images is None else images.val,
            moments=moments,
            training=order.training if order.method.trains else None,
            folder=here.folder,
            resume=here.options.resume,
            session=here.session,
            on_progress=on_progress,
            on_step=on_step,
        )
    return result, cost


def check_budget(space: RankSpace, budget: Budget, cost: Costs) -> None:
    """Refuses a budget that no network of the space keeps to, before anything is written or anything long begins."""
    from haloc.methods.budget import limits_of
    from haloc.methods.solve import check_reachable

    if space.open_layers:  # else the search itself says so
        check_reachable(limits_of(space, budget, cost))


def draw_search(result: SearchResult, folder: Path) -> None:
    """Draws how a search went and what it chose, into its folder."""
    from haloc.report.search_figures import search_figures
    from haloc.report.style import write_figure

    for name, figure in search_figures(result.evidence, result.plan).items():
        write_figure(figure, folder / f"{name}.svg")
        note(f"drew {folder / name}.svg")


def check_config(config: Mapping[str, Any], here: Here) -> None:
    """Refuses to go on with a search that was told something else."""
    path = here.folder / CONFIG
    if not (here.options.resume and path.exists()):
        return
    old, new = _flat(read_json(path)), _flat(config)
    free = _FREE | set(GENTLER) if here.diverged else _FREE
    for name in [*new, *old]:
        parts = name.split(".")
        if old.get(name) != new.get(name) and not {parts[0], parts[-1]} & free:
            again = f"for other budgets there is haloc search --from {here.folder}/search.json; "
            raise SpecError(
                f"{here.folder} holds a search with {name} = {old.get(name)}, and now it is {new.get(name)}; "
                f"{again * (parts[0] == 'budget')}go on with the same settings, start afresh with --no-resume, or "
                "choose another folder"
            )


def training_for(method: Method, options: TrainSettings, given: set[str]) -> TrainSettings:
    """How a method trains: as it likes to, but for what the user says."""
    own: TrainSettings | None = getattr(import_module(f"haloc.methods.{method.name}"), "TRAINING", None)
    return options if own is None else replace(own, **{n: v for n, v in asdict(options).items() if n in given})


@contextmanager
def left_alone(here: Here) -> Iterator[None]:
    """Takes a folder away again in which nothing but the command was written before a mistake was found."""
    try:
        yield
    except HalocError:
        own = here.folder / CONFIG
        if here.session.is_main and {path.name for path in here.folder.iterdir()} == {own.name, LOCK}:
            own.unlink()  # the empty folder goes when the run lets go of it
        raise


@contextmanager
def following(what: str) -> Iterator[tuple[Callable[[int, int], None], Callable[[Progress], None]]]:
    """Bars for work in steps and for training, of which one is shown at a time: the one that is under way."""
    with ExitStack() as shown:
        bars: dict[str, Callable[..., None]] = {}

        def show(kind: str, bar: Callable[[str], Any], *state: Any) -> None:
            if kind not in bars:
                shown.close()
                bars.clear()
                bars[kind] = shown.enter_context(bar(what))
            bars[kind](*state)

        yield partial(show, "steps", counting), partial(show, "training", training_progress)


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, item in value.items():
        found |= _flat(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {f"{prefix}{name}": item}
    return found
