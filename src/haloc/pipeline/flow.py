"""`compress`: all stages one after the other, each of them skipped where nothing that decides it has changed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from haloc.cost.count import COUNTS
from haloc.cost.machine import environment
from haloc.cost.measure import check_available, same_machine
from haloc.cost.table import Table
from haloc.cost.target import Target
from haloc.errors import FileFormatError, SpecError, nearest
from haloc.files import replacing
from haloc.locks import folder_at_work, only_traces
from haloc.methods.budget import is_share, share_or_amount
from haloc.methods.search import method_of
from haloc.pipeline.deliver import STAGES, check_extras
from haloc.pipeline.job import Job, Loss, Score, job_from, make_job
from haloc.pipeline.listener import Listener
from haloc.pipeline.recipe import Recipe
from haloc.pipeline.settings import check_search, finetuning
from haloc.pipeline.stage import MEASURED, Stage
from haloc.pipeline.stamps import FILE, Stamps, code_version, fingerprint
from haloc.pipeline.work import MODEL, PAGE, PLAN, RECIPE, REPORT, Work
from haloc.plan import Plan
from haloc.training.session import Session


@dataclass(frozen=True)
class Report:
    """What came of it.

    Attributes:
        facts: All figures, as ``report.json`` has them.
        folder: Where everything lies: the page ``report.html``, the network ``model/``, exported files, the plan.
    """

    facts: Mapping[str, Any]
    folder: Path

    @property
    def met(self) -> bool:
        """Whether all budgets are kept to, by what was measured where something was."""
        return bool(self.facts["verdict"]["met"])

    @property
    def page(self) -> Path:
        """The report to look at."""
        return self.folder / PAGE

    def __str__(self) -> str:
        return str(self.facts["verdict"]["text"])


class Compressed(NamedTuple):
    """A smaller network and the report of how it came about."""

    model: nn.Module
    report: Report


def compress(
    model: nn.Module,
    example_inputs: Any,
    *,
    budget: str | float | Mapping[str, str | float],
    target: Target | str | None = None,
    train: Any = None,
    val: Any = None,
    test: Any = None,
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
    score: Score | None = None,
    inputs: Callable[[Any], Any] | None = None,
    folder: str | Path | None = None,
    name: str | None = None,
    narrow: Mapping[str, Any] | None = None,
    space: Mapping[str, Any] | None = None,
    table: Mapping[str, Any] | None = None,
    search: Mapping[str, Any] | str | None = None,
    recalibrate: Mapping[str, Any] | None = None,
    reconstruct: Mapping[str, Any] | None = None,
    finetune: Mapping[str, Any] | None = None,
    export: Mapping[str, Any] | None = None,
    seed: int = 0,
    listener: Listener | None = None,
) -> Compressed:
    """Makes a trained network cheaper on a target, recovers what it loses, exports it and writes a report.

    The sections are those of a recipe file, by the same names; see `haloc.pipeline.recipe`.

    Args:
        model: The trained dense network, on the device to train on; it is put into eval mode, and its weights are not
            changed.
        example_inputs: What it takes: a tensor, a tuple or a dict.
        budget: What may remain: ``{"latency": "60%"}``, ``{"macs": "30%", "params": "25%"}``, ``{"latency": "4 ms"}``;
            a bare ``"60%"`` is of the latency where there is a target, else of the multiply-adds.
        target: Where it is to run, such as ``"cpu:onnxruntime:b64"``.
        train: Training batches: a data set's ``batches(…)`` or any loader; without them nothing is recovered.
        val: Held-out batches, for the search.
        test: Batches that a classifier is judged on.
        teacher: Who teaches in the fine-tuning: the dense network, or another one that answers the same question.
        loss: ``(model, batch) -> Tensor`` or named tensors, for what is no classifier.
        score: ``(model) -> float``, the higher the better, for what is no classifier.
        inputs: Takes the model's inputs out of a batch; by default the first of a tuple, a dict without its labels.
        folder: The folder of the run; what is in it already is not done again. By default a new temporary one.
        name: What the network is called in the report.
        narrow: What narrowing is to leave before ranks are chosen, as in ``{"macs": "70%"}`` or ``{"latency": "70%"}``;
            by default nothing is narrowed.
        space: What ranks are on offer, as in ``{"forms": ["tucker2"], "round_to": 8}``.
        table: How the target is measured, as in ``{"networks": 4}``, or ``{"table": "table.json"}`` for one that is.
        search: Who chooses, as in ``{"method": "sensitivity"}``, or just that name.
        recalibrate: As in ``{"images": 2000}``.
        reconstruct: As in ``{"epochs": 10, "images": 1024}``: blocks learn from inputs alone; by default they do not.
        finetune: As in ``{"epochs": 20, "lr": 0.02}``; ``{"epochs": 0}`` does without.
        export: As in ``{"formats": ["onnx"], "int8": True}``.
        seed: Decides what is drawn at random.
        listener: Told how it goes.

    Returns:
        The network, plain and in eval mode, and the report.
    """
    recipe = Recipe.from_dict(
        {
            "budget": _named_budget(budget, target, table),
            "target": {"name": None if target is None else str(target), **(table or {})},
            "narrow": dict(narrow or {}),
            "space": dict(space or {}),
            "search": {"method": search} if isinstance(search, str) else dict(search or {}),
            "recalibrate": dict(recalibrate or {}),
            "reconstruct": dict(reconstruct or {}),
            "finetune": dict(finetune or {}),
            "export": dict(export or {}),
            "run": {"seed": seed},
        }
    )
    labels = {} if name is None else {"model": {"name": name}}
    job = make_job(
        model, example_inputs, train=train, val=val, test=test, teacher=teacher, loss=loss, score=score, inputs=inputs,
        labels=labels,
    )  # fmt: skip
    where = Path(tempfile.mkdtemp(prefix="haloc-")) if folder is None else Path(folder)
    return run(recipe, job, where, listener or Listener())


def compress_recipe(
    recipe: Recipe, folder: str | Path, listener: Listener | None = None, session: Session | None = None
) -> Compressed:
    """Does what a recipe says, in a folder.

    Args:
        recipe: What is to be done.
        folder: The folder of the run.
        listener: Told how it goes.
        session: This process among several, from `join_session`: all of them search and train, the first does the rest.
    """
    check_recipe(recipe)
    session = session or Session()
    if session.is_main:  # the others would find what the first has begun to write
        check_folder(Path(folder))
    return run(recipe, job_from(recipe), Path(folder), listener or Listener(), session)


def run(recipe: Recipe, job: Job, folder: Path, listener: Listener, session: Session | None = None) -> Compressed:
    """Goes through all stages."""
    check_recipe(recipe)
    work = replace(opened(recipe, job, folder, listener), session=session or Session())
    if not work.session.is_main:
        return follow(work)
    with begin(work) as stamps:
        for number, stage in enumerate(STAGES, start=1):
            do(stage, work, stamps, f"{number}/{len(STAGES)}")
        work.session.wait()
        return ended(work)


def follow(work: Work) -> Compressed:
    """What all processes but the first do: they wait for it, and work with it where a stage is shared."""
    for stage in STAGES:
        if stage.shared(work) and work.session.agree(False):
            stage.run(work)
    work.session.wait()
    return ended(work)


def opened(recipe: Recipe, job: Job, folder: Path, listener: Listener) -> Work:
    """A run that can begin: whatever can be refused has been."""
    work = Work(folder, recipe, job, listener)
    check_extras(work)
    check_plan(work)
    check_needs(recipe, job)
    check_narrow(work)
    return work


@contextmanager
def begin(work: Work) -> Iterator[Stamps]:
    """Takes hold of the folder of a run, and gives what is known of its stages."""
    with at_work(work.folder):
        stamps = Stamps(work.folder)
        stamps.save()  # from now on the folder is ours
        with replacing(work.file(RECIPE)) as temporary:
            temporary.write_text(work.recipe.to_toml(), encoding="utf-8")
        yield stamps


def ended(work: Work) -> Compressed:
    """What a run has come to that is through with its stages."""
    return Compressed(work.saved(MODEL), Report(work.json(REPORT), work.folder))


def do(stage: Stage, work: Work, stamps: Stamps, place: str) -> None:
    """One stage, if it has not been done already with what it would be done with now."""
    settled = _settled(stage, work, stamps)
    shared = stage.shared(work)
    if settled is not None:
        work.listener.kept(stage.name, settled, place)
        _ = shared and work.session.agree(False)
        return
    wanted, known = fingerprint_of(stage, work), stamps.get(stage.name)
    if known is None or known.fingerprint != wanted or known.done:
        stage.clear(work)
    work.listener.stage(stage.name, stage.what, place)
    stamps.begin(stage.name, wanted)
    started = time.perf_counter()
    _ = shared and work.session.agree(True)
    stage.run(work)
    stamps.end(stage.name, time.perf_counter() - started, stage.files(work))


def _settled(stage: Stage, work: Work, stamps: Stamps) -> str | None:
    """Why a stage has nothing to do, or None where it has."""
    idle = stage.idle(work)
    if idle is not None:
        return f"not needed: {idle}"
    known = stamps.get(stage.name)
    same = known is not None and known.fingerprint == fingerprint_of(stage, work) and known.done
    return "done before" if same and _intact(stage, work, stamps) else None


def fingerprint_of(stage: Stage, work: Work) -> str:
    """Of all that decides a stage, this version's code included."""
    return fingerprint([code_version(), stage.name, stage.inputs(work)])


def _intact(stage: Stage, work: Work, stamps: Stamps) -> bool:
    """Whether a finished stage's files are there, as it left them or as somebody has edited them since."""
    changed = stamps.changed(stage.name)
    if not changed:
        return True
    if stage.reread is None or not all(work.file(name).is_file() for name in changed):
        work.listener.note(f"{', '.join(changed)} is not what stage {stage.name!r} left; it is made again")
        return False
    stage.reread(work)  # what is wrong with it is said; it is not overwritten
    work.listener.note(f"{', '.join(changed)} was edited; going on with it as it is")
    known = stamps.get(stage.name)
    assert known is not None
    stamps.end(stage.name, known.seconds, known.files)
    return True


def check_recipe(recipe: Recipe) -> None:
    """Refuses what cannot be before anything is loaded."""
    if not recipe.budget:
        raise SpecError('how small is it to become? Give a budget, as in [budget] latency = "60%", or macs = "50%"')
    target, known = recipe.target, (*MEASURED, *COUNTS)
    for name in recipe.budget:
        if name not in known:
            raise SpecError(f"there is no budget of {name!r}, only of {', '.join(known)}.{nearest(name, known)}")
    for wanted in (*recipe.budget.values(), *recipe.narrow.budget.values()):
        is_share(wanted)  # what is neither a share nor an amount is refused before hours are spent
    measured = [name for name in recipe.budget if name in MEASURED]
    measured += ["narrow.latency"] if recipe.narrow.latency is not None else []
    if measured and target.name is None and target.table is None:
        raise SpecError(
            f"a budget of {measured[0]} needs a target to measure it on, as in [target] name = "
            '"cpu:onnxruntime:b64"; or budget macs or params, which are counted'
        )
    if recipe.narrow.latency is not None:
        share_or_amount(recipe.narrow.latency, "latency", 1.0, "ms")  # what is in seconds is refused here
    if target.name is not None:
        _check_target(Target.parse(target.name), target.table)
    check_search(recipe)
    finetuning(recipe)


def _check_target(target: Target, table: str | None) -> None:
    """Refuses a table that is of something else."""
    if table is not None and Table.load(table).target != target:
        raise SpecError(
            f"target.table is of {Table.load(table).target}, target.name is {target}; leave one of them out"
        )


def check_plan(work: Work) -> None:
    """Refuses a given plan that cannot be read, or that is the very file which the run would replace."""
    given = work.recipe.search.plan
    if given is None:
        return
    if Path(given).resolve() == work.file(PLAN).resolve():
        raise SpecError(f"search.plan is the plan of this very run, {given}; copy it elsewhere, or give another folder")
    Plan.load(given)


def check_needs(recipe: Recipe, job: Job) -> None:
    """Refuses a method without the data that it cannot do without."""
    if recipe.search.plan is not None:
        return
    method = method_of(recipe.search.method)
    for need in method.needs:
        if all(getattr(job, name) is None for name in need.split("|")):
            raise SpecError(
                f"method {method.name!r} needs data for {need.replace('|', ' or ')}; give them, or take a method that "
                "needs none, such as energy"
            )


def check_narrow(work: Work) -> None:
    """Refuses to measure widths where the target is not: a table of ranks from elsewhere says nothing of them."""
    given, target = work.recipe.target.table, work.target
    if work.recipe.narrow.latency is None or target is None or target.device == "asic":
        return
    check_available(target)
    if given is not None:
        same_machine(given, Table.load(given).environment, environment(target.to_dict()))


def check_folder(folder: Path) -> None:
    """Refuses a folder that has something else in it than a run."""
    if folder.exists() and not folder.is_dir():
        raise FileFormatError(f"{folder} is a file, expected a folder for the run; choose another name")
    inside = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if FILE not in inside and any(name.startswith("seed-") for name in inside):
        raise FileFormatError(f"{folder} holds runs with several seeds; run it with --seeds, or choose another folder")
    if inside and FILE not in inside and not only_traces(folder):
        raise FileFormatError(f"{folder} has something else in it than a run of haloc compress; choose another folder")


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """Makes the folder, and keeps others out of it as long as this process works there."""
    check_folder(folder)
    with folder_at_work(folder):
        yield


def _named_budget(
    budget: str | float | Mapping[str, str | float], target: Target | str | None, table: Mapping[str, Any] | None
) -> dict[str, Any]:
    if isinstance(budget, Mapping):
        return dict(budget)
    measured = target is not None or "table" in (table or {})
    return {"latency" if measured else "macs": budget}
