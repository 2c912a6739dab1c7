"""Several runs in one process: recipes against each other, a recipe with several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from haloc.errors import HalocError, SpecError
from haloc.factor.forward import device_of
from haloc.files import write_json
from haloc.pipeline.beside import Crowd, side_by_side
from haloc.pipeline.deliver import STAGES
from haloc.pipeline.flow import Compressed, Report, begin, check_recipe, do, ended, opened
from haloc.pipeline.job import job_from
from haloc.pipeline.listener import Listener
from haloc.pipeline.recipe import Recipe
from haloc.pipeline.stamps import Stamps
from haloc.pipeline.work import PLAN, Work

_TRAINED = "finetune"


@dataclass(frozen=True)
class Order:
    """A run that is to be done.

    Attributes:
        name: What it is called beside others.
        recipe: What is to be done.
        folder: Where.
    """

    name: str
    recipe: Recipe
    folder: Path


def with_seeds(name: str, recipe: Recipe, folder: Path, seeds: int) -> list[Order]:
    """A recipe with so many seeds, the ranks being chosen once, by the first; one seed is the recipe as it is."""
    if seeds < 1:
        raise SpecError(f"a recipe is run with 1 seed or more, got {seeds}")
    if seeds == 1:
        return [Order(name, recipe, folder)]
    first = recipe.run.seed
    own = [replace(recipe, run=replace(recipe.run, seed=seed)) for seed in range(first, first + seeds)]
    given = replace(recipe.search, plan=recipe.search.plan or str(folder / f"seed-{first}" / PLAN))
    others = [replace(other, search=given) for other in own[1:]]
    return [Order(name, each, folder / f"seed-{each.run.seed}") for each in (own[0], *others)]


#: What a run has come to: a network, or what was wrong.
Result = Compressed | HalocError


def compress_many(
    orders: Sequence[Order], listener: Listener | None = None, *, at_once: int = 3
) -> Iterator[tuple[Order, Result]]:
    """Goes through several runs as `compress_recipe` would; on a GPU up to ``at_once`` are fine-tuned side by side.

    A run that fails does not keep the others from being done: its error takes the place of its network.
    """
    if at_once < 1:
        raise SpecError(f"at least 1 network is trained at once, got {at_once}")
    for order in orders:
        check_recipe(order.recipe)
    for start in range(0, len(orders), at_once):
        yield from _together(orders[start : start + at_once], listener or Listener())


def comparison(results: Iterable[tuple[Order, Result]]) -> list[dict[str, Any]]:
    """A row for every recipe: its figures in the mean over its seeds, and how far these scatter.

    Seeds that failed are not in the mean; a recipe of which none came through has no row.
    """
    found: dict[str, list[Compressed]] = {}
    for order, result in results:
        if not isinstance(result, HalocError):
            found.setdefault(order.name, []).append(result)
    return [_row(name, [result.report for result in own]) for name, own in found.items()]


def _row(name: str, reports: Sequence[Report]) -> dict[str, Any]:
    """One line of a comparison."""
    rows = [{row["key"]: row for row in report.facts["figures"]} for report in reports]
    keys = [key for key in rows[0] if all(key in other for other in rows)]
    seeds = [report.folder.name.removeprefix("seed-") for report in reports] if len(reports) > 1 else []
    seconds = [{stage["name"]: stage["seconds"] for stage in report.facts["stages"]} for report in reports]
    return {
        "name": name,
        "method": reports[0].facts["search"]["method"],
        "seeds": [int(seed) for seed in seeds],
        "met": all(report.met for report in reports),
        "figures": {key: _figure([other[key] for other in rows]) for key in keys},
        "seconds": seconds,
    }


def _figure(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several runs say of one quantity."""
    values = [float(row["after"]) for row in rows]
    spread = stdev(values) if len(values) > 1 else None
    told = {key: rows[0][key] for key in ("name", "unit", "before", "budget") if key in rows[0]}
    return told | {"after": fmean(values), "spread": spread, "values": values}


def write_comparison(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Keeps a comparison as ``comparison.json``."""
    write_json(folder / "comparison.json", {"kind": "haloc-comparison", "format": 1, "rows": list(rows)})


def _together(wave: Sequence[Order], listener: Listener) -> Iterator[tuple[Order, Result]]:
    """Fine-tuning is the one stage that is done side by side: all others are short, or time things."""
    middle = [stage.name for stage in STAGES].index(_TRAINED)
    with ExitStack() as folders:
        runs: list[tuple[Order, Work, Stamps]] = []
        for order in wave:
            try:
                runs.append((order, *_begun(order, folders, listener, range(middle))))
            except HalocError as error:
                yield order, error
        tasks = [partial(_go, work, stamps, range(middle, middle + 1)) for _, work, stamps in runs]
        errors = _train([work for _, work, _ in runs], tasks, listener)
        for (order, work, stamps), raised in zip(runs, errors, strict=True):
            yield order, raised or _ended(work, stamps, range(middle + 1, len(STAGES)))


def _begun(order: Order, folders: ExitStack, listener: Listener, places: range) -> tuple[Work, Stamps]:
    listener.note(f"{order.name}, seed {order.recipe.run.seed}: {order.folder}")
    work = opened(order.recipe, job_from(order.recipe), order.folder, listener)
    stamps = folders.enter_context(begin(work))
    _go(work, stamps, places)
    return work, stamps


def _ended(work: Work, stamps: Stamps, places: range) -> Result:
    try:
        _go(work, stamps, places)
        return ended(work)
    except HalocError as error:
        return error


def _go(work: Work, stamps: Stamps, places: range) -> None:
    for place in places:
        do(STAGES[place], work, stamps, f"{place + 1}/{len(STAGES)}")


def _train(works: Sequence[Work], tasks: Sequence[Callable[[], None]], listener: Listener) -> list[HalocError | None]:
    """Side by side on a GPU; networks that draw random numbers while they train would draw each other's."""
    alone = any(device_of(work.job.model).type != "cuda" or _draws(work.job.model) for work in works)
    if alone or len(tasks) < 2:
        return [_error_of(task) for task in tasks]
    crowd = Crowd(listener, len(tasks))
    for work in works:
        work.listener = crowd.seat()
    try:
        return list(map(_ours, side_by_side(tasks, crowd, device_of(works[0].job.model))))
    finally:
        for work in works:
            work.listener = listener


def _error_of(task: Callable[[], None]) -> HalocError | None:
    try:
        task()
    except HalocError as error:
        return error
    return None


def _ours(error: Exception | None) -> HalocError | None:
    """What can be told in a sentence; anything else is raised."""
    if error is not None and not isinstance(error, HalocError):
        raise error
    return error


def _draws(model: nn.Module) -> bool:
    return any(isinstance(module, _DropoutNd) and module.p > 0 for module in model.modules())
