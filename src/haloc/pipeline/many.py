"""Several runs in one process: recipes against each other, a recipe with several seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from haloc.errors import HalocError, SpecError
from haloc.factor.forward import call, device_of, to_device
from haloc.files import write_json
from haloc.pipeline.beside import Crowd, side_by_side
from haloc.pipeline.deliver import STAGES
from haloc.pipeline.flow import Compressed, Report, begin, check_recipe, do, ended, opened
from haloc.pipeline.job import Job, job_from
from haloc.pipeline.listener import Listener
from haloc.pipeline.recipe import Recipe
from haloc.pipeline.settings import finetuning
from haloc.pipeline.stamps import Stamps
from haloc.pipeline.work import PLAN, Work
from haloc.training.checkpoint import random_states
from haloc.training.feed import as_feed
from haloc.training.settings import TrainSettings
from haloc.training.surroundings import own_random_numbers

_TRAINED = "finetune"


@dataclass(frozen=True)
class Order:
    """A run that is to be done.

    Attributes:
        name: What it is called beside others.
        recipe: What is to be done.
        folder: Where.
        method: Who chooses its ranks, where that is another run with the same recipe.
    """

    name: str
    recipe: Recipe
    folder: Path
    method: str | None = None


def with_seeds(name: str, recipe: Recipe, folder: Path, seeds: int) -> list[Order]:
    """A recipe with so many seeds, the ranks being chosen once, by the first; one seed is the recipe as it is."""
    if seeds < 1:
        raise SpecError(f"a recipe is run with 1 seed or more, got {seeds}")
    if seeds == 1:
        return [Order(name, recipe, folder)]
    first = recipe.run.seed
    own = [replace(recipe, run=replace(recipe.run, seed=seed)) for seed in range(first, first + seeds)]
    chosen = (folder / f"seed-{first}" / PLAN).resolve()
    given = replace(recipe.search, plan=recipe.search.plan or str(chosen))
    others = [replace(other, search=given) for other in own[1:]]
    method = None if recipe.search.plan is not None else recipe.search.method
    return [Order(name, each, folder / f"seed-{each.run.seed}", method) for each in (own[0], *others)]


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
    with ThreadPoolExecutor(at_once, "beside") as workers:
        for start in range(0, len(orders), at_once):
            yield from _together(orders[start : start + at_once], listener or Listener(), workers)


def comparison(results: Iterable[tuple[Order, Result]]) -> list[dict[str, Any]]:
    """A row for every recipe: its figures in the mean over its seeds, and how far these scatter.

    Seeds that failed are not in the mean; a recipe of which none came through has no row.
    """
    found: dict[str, list[tuple[Order, Report]]] = {}
    for order, result in results:
        if not isinstance(result, HalocError):
            found.setdefault(order.name, []).append((order, result.report))
    return [_row(name, own) for name, own in found.items()]


def failures(results: Iterable[tuple[Order, Result]]) -> list[dict[str, str]]:
    """The runs that did not come through, and why."""
    failed = ((order, result) for order, result in results if isinstance(result, HalocError))
    return [{"name": order.name, "folder": str(order.folder), "error": str(error)} for order, error in failed]


def _row(name: str, runs: Sequence[tuple[Order, Report]]) -> dict[str, Any]:
    """One line of a comparison."""
    reports = [report for _, report in runs]
    rows = [{row["key"]: row for row in report.facts["figures"]} for report in reports]
    keys = [key for key in rows[0] if all(key in other for other in rows)]
    seconds = [{stage["name"]: stage["seconds"] for stage in report.facts["stages"]} for report in reports]
    return {
        "name": name,
        "method": runs[0][0].method or reports[0].facts["search"]["method"],
        "seeds": [order.recipe.run.seed for order, _ in runs],
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


def write_comparison(folder: Path, results: Sequence[tuple[Order, Result]]) -> dict[str, Any]:
    """Keeps a comparison as ``comparison.json``, and returns what it says."""
    said = {"kind": "haloc-comparison", "format": 1, "rows": comparison(results), "failed": failures(results)}
    write_json(folder / "comparison.json", said)
    return said


def _together(wave: Sequence[Order], listener: Listener, workers: Executor) -> Iterator[tuple[Order, Result]]:
    """Fine-tuning is the one stage that is done side by side: all others are short, or time things."""
    middle = [stage.name for stage in STAGES].index(_TRAINED)
    with ExitStack() as folders:
        runs: list[tuple[Order, Work, Stamps]] = []
        for order in wave:
            try:
                runs.append((order, *_begun(order, folders, listener, range(middle))))
            except HalocError as error:
                listener.note(f"{order.folder}: {error}")
                yield order, error
        tasks = [partial(_go, work, stamps, range(middle, middle + 1)) for _, work, stamps in runs]
        errors = _train([work for _, work, _ in runs], tasks, listener, workers)
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


def _train(
    works: Sequence[Work], tasks: Sequence[Callable[[], None]], listener: Listener, workers: Executor
) -> list[HalocError | None]:
    """Side by side on a GPU, where nothing that they share with each other can make a difference."""
    if len(tasks) < 2 or not _independent(works):
        return [_error_of(task) for task in tasks]
    crowd = Crowd(listener, len(tasks))
    for work in works:
        work.listener = crowd.seat()
    try:
        where, (precision,) = device_of(works[0].job.model), {_training(work).precision for work in works}
        return list(map(_ours, side_by_side(tasks, crowd, where, precision, workers=workers)))
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


def _independent(works: Sequence[Work]) -> bool:
    """Whether networks can train in one process without one of them noticing the others.

    Precision and compilers are set for the whole process, and so are random numbers: who draws any while it trains, a
    network with dropout or a user's own loader or loss, would draw the others'.
    """
    if any(work.job.train is None or device_of(work.job.model).type != "cuda" for work in works):
        return False
    trained = [_training(work) for work in works]
    own = any(work.job.loss is not None or not as_feed(work.job.train).seekable for work in works)
    alike = len({settings.precision for settings in trained}) == 1 and all(s.speed != "compile" for s in trained)
    return alike and not own and not any(draws(work.job) for work in works)


def _training(work: Work) -> TrainSettings:
    told = finetuning(work.recipe, work.job.loss is not None)
    return TrainSettings() if told is None else told[0]


def draws(job: Job) -> bool:
    """Whether a network draws random numbers in a step; one that cannot be tried is taken to."""
    try:
        with own_random_numbers(0):
            network, before = copy.deepcopy(job.model).train(), random_states()
            for inputs in job.samples(1):
                call(network, to_device(inputs, device_of(network)))
            return any(not torch.equal(state, before[name]) for name, state in random_states().items())
    except Exception:  # whatever it is, the training itself will tell
        return True
