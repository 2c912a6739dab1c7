"""The stages one by one: what decides each, what it does, and what it leaves in the folder of the run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from haloc.artifact.store import save
from haloc.cost.machine import environment
from haloc.cost.measure import measure, same_machine
from haloc.cost.network import sample_plans, time_models, time_networks
from haloc.cost.predict import choose_rows, parse_share
from haloc.cost.table import Table
from haloc.cost.target import Target
from haloc.errors import HalocError, SpecError
from haloc.factor.inspect import inspect
from haloc.factor.surgery import apply_plan
from haloc.files import read_json, write_json
from haloc.forms import Dense, Form
from haloc.methods.budget import affordable, limits_of
from haloc.methods.search import search
from haloc.methods.solve import check_reachable
from haloc.narrowing import (
    NarrowSettings,
    WidthCost,
    hidden_channels,
    kept_widths,
    measure_widths,
    narrow,
    narrowed_of,
)
from haloc.pipeline.choose import check_edited, choose
from haloc.pipeline.job import weights_digest
from haloc.pipeline.recover import rehearsal
from haloc.pipeline.settings import decisive, method_settings, search_training
from haloc.pipeline.stage import MEASURED, Stage, digests, remove, saved
from haloc.pipeline.stamps import file_digest
from haloc.pipeline.work import (
    APPLIED,
    CHECKS,
    EVIDENCE,
    LAYERS,
    NARROW,
    NARROWED,
    NARROWER,
    NETWORKS,
    ORIGINAL,
    OUTCOME,
    PLAN,
    SEARCH,
    SPACE,
    TABLE,
    WIDTH_NETWORKS,
    WIDTHS,
    Work,
)
from haloc.plan import Plan
from haloc.shapes import Shape, as_deployed
from haloc.space import rank_space

# narrow


def _narrow_inputs(work: Work) -> Any:
    target = work.target if work.by_clock else None
    clock = None if target is None else [target.to_dict(), work.recipe.target.networks]
    return [weights_digest(work.job.model), asdict(work.recipe.narrow), work.job.identity, clock]


def _narrow_clear(work: Work) -> None:
    """What trials have shown stays, and what widths cost on the same target: they are the same for other shares."""
    remove(work, NARROWED, OUTCOME)
    if work.by_clock and not _measured_here(work, WIDTHS):
        remove(work, WIDTHS, f"{WIDTHS}.rows", WIDTH_NETWORKS, f"{WIDTH_NETWORKS}.rows")


def _narrow(work: Work) -> None:
    job, part = work.job, work.recipe.narrow
    inputs = job.samples(max(part.images, part.tried))
    if not inputs:
        raise SpecError("a network is narrowed by what it says to training images, and there are none; give some")
    told = NarrowSettings(round_to=part.round_to, images=part.images, tried=part.tried)
    cost = _width_cost(work) if work.by_clock else None
    with work.listener.steps("narrowing") as step:
        network = narrow(
            job.model, job.example, inputs, budget=part.budget, cost=cost, settings=told, folder=work.file(NARROW),
            on_step=step,
        )  # fmt: skip
    if cost is not None:
        found, dense = cost.of(kept_widths(narrowed_of(network))), cost.of({})
        write_json(work.file(OUTCOME), {"latency_ms": found.value, "error_ms": found.error, "dense_ms": dense.value})
    save(work.file(NARROWED), network)
    inspect(job.model, job.example).save(work.file(ORIGINAL))  # the last, by which it is known to be done


def _width_cost(work: Work) -> WidthCost:
    """What widths cost on the target."""
    target, model, example = work.target, *work.job.on_cpu()
    assert target is not None
    hidden = hidden_channels(model, example)
    with work.listener.steps(f"measuring what widths cost on {target}") as step:
        return measure_widths(
            model, example, hidden, target, round_to=work.recipe.narrow.round_to, path=work.file(WIDTHS),
            networks=work.recipe.target.networks, on_progress=step,
        )  # fmt: skip


# inspect


def _inspect(work: Work) -> None:
    inspect(work.network, work.job.example).save(work.file(LAYERS))


# space


def _space(work: Work) -> None:
    part = work.recipe.space
    layers, names = work.layers, part.layers or None
    table = None
    if part.round_to == "auto":
        if work.recipe.target.table is None:
            raise SpecError("space.round_to = 'auto' takes the ranks from a table of many; give that with target.table")
        table = Table.load(work.recipe.target.table)
    found = rank_space(
        layers, forms=part.forms, round_to=part.round_to, equal=part.equal, names=names, ratio=part.ratio, cost=table
    )
    if not found.open_layers:
        reasons = sorted({layer.reason for layer in layers if layer.reason})
        why = f": {'; '.join(reasons[:3])}" if reasons else ""
        raise SpecError(f"no layer of the network has another form than dense on offer{why}")
    counted = {name: work.allowed(name) for name in work.recipe.budget if name not in MEASURED}
    if counted:  # what is measured is looked at when it has been
        limits = limits_of(found, counted, {name: work.counted[name] for name in counted if name in work.counted})
        check_reachable(limits)
        found = affordable(found, limits) if part.affordable else found
    write_json(work.file(SPACE), found.to_dict())


def _space_inputs(work: Work) -> Any:
    counted = {name: wanted for name, wanted in work.recipe.budget.items() if name not in MEASURED}
    given = work.recipe.target.table if work.recipe.space.round_to == "auto" else None
    told = [given and _digest(Path(given)), counted, *map(str, work.counted.values())]
    return [digests(work, LAYERS), asdict(work.recipe.space), *told]


# table


def _table_inputs(work: Work) -> Any:
    part, target = work.recipe.target, work.target
    given = None if part.table is None else [_digest(path) for path in (Path(part.table), _beside(Path(part.table)))]
    wanted = [None if target is None else target.to_dict(), part.rows, part.networks, given]
    return [work.weights, wanted, digests(work, SPACE)]


def _digest(path: Path) -> str | None:
    return file_digest(path) if path.is_file() else None


def _beside(table: Path) -> Path:
    """Where timings of whole networks lie."""
    return table.with_suffix(".network.json")


def _table_clear(work: Work) -> None:
    """Rows stay that were measured here for the same target: another space may need them again."""
    remove(work, NETWORKS, f"{NETWORKS}.rows", NARROWER)
    if not _measured_here(work, TABLE):
        remove(work, TABLE, f"{TABLE}.rows")


def _measured_here(work: Work, name: str) -> bool:
    """Whether a table of the run is of its target, and of this machine."""
    target = work.target
    with suppress(HalocError):
        known = Table.load(work.file(name)) if work.file(name).exists() else None
        if known is not None and target is not None and known.target == target and target.device != "asic":
            same_machine(name, known.environment, environment(target.to_dict()))
            return True
    return False


def _table(work: Work) -> None:
    part, target, space = work.recipe.target, work.target, work.space
    assert target is not None
    if part.table is not None:
        _copy_table(work, Path(part.table))
        return
    rows = (*space.rows(), *_original_rows(work, target))
    if parse_share(part.rows, len(rows)) != len(rows):
        rows = choose_rows(rows, part.rows)
    with work.listener.steps(f"measuring {len(rows)} rows on {target}") as step:
        measure(rows, target, path=work.file(TABLE), on_progress=step)
    if part.networks and target.device != "asic":
        plans = sample_plans(space, part.networks)
        with work.listener.steps(f"timing {len(plans)} whole networks on {target}") as step:
            time_networks(*work.on_cpu(), plans, target, path=work.file(NETWORKS), on_progress=step)
    if work.narrows and target.device != "asic":
        _time_narrowing(work, target)


def _original_rows(work: Work, target: Target) -> list[tuple[Shape, Form]]:
    """What the original's layers cost as they are, where no clock tells what narrowing has left of that."""
    if not work.narrows or target.device != "asic":
        return []
    shapes = dict.fromkeys(as_deployed(call) for layer in work.original for call in layer.calls)
    return [(shape, Dense()) for shape in shapes if (shape, Dense()) not in set(work.space.rows())]


def _time_narrowing(work: Work, target: Target) -> None:
    """What narrowing alone has left of the latency."""
    dense, example = work.job.on_cpu()
    with work.listener.steps(f"timing the narrowed network and the dense one on {target}"):
        times = time_models({"dense": dense, "narrowed": work.on_cpu()[0]}, example, target)
    write_json(work.file(NARROWER), {"latency": times["narrowed"].value / times["dense"].value})


def _copy_table(work: Work, source: Path) -> None:
    write_json(work.file(TABLE), read_json(source))
    if _beside(source).exists():
        write_json(work.file(NETWORKS), read_json(_beside(source)))


def _table_files(work: Work) -> list[str]:
    return [name for name in (TABLE, NETWORKS, NARROWER) if work.file(name).exists()]


# search


def _search_inputs(work: Work) -> Any:
    part, training = work.recipe.search, search_training(work.recipe)
    if part.plan is not None:
        return [work.weights, _digest(Path(part.plan)), digests(work, LAYERS, SPACE)]
    told = [part.method, _looked_at(work), method_settings(part), decisive(training), *_rehearsed(work)]
    files = digests(work, SPACE, TABLE, NETWORKS, NARROWER)
    wanted = [dict(work.recipe.budget), *map(str, work.counted.values())]
    asked = [work.recipe.target.attempts, work.recipe.target.margin]
    return [work.weights, wanted, asked, told, files, work.job.identity]


def _looked_at(work: Work) -> Any:
    """By how many images layers are known, and whether what comes of their errors is known as well."""
    images = work.recipe.search.activations
    return [images, "responses"] if images and work.responses else images


def _rehearsed(work: Work) -> list[Any]:
    """How networks will be fine-tuned, where the search tries that."""
    practice = rehearsal(work) if getattr(method_settings(work.recipe.search), "trial", "") == "finetuned" else None
    return [] if practice is None else [practice.identity]


def _search_clear(work: Work) -> None:
    """What methods noted of their measurements stays: they know themselves what it is of."""
    notes = [path for path in work.file(SEARCH).glob("*.jsonl") if path.name != "log.jsonl"]
    remove(work, PLAN, *(f"{SEARCH}/{path.name}" for path in work.file(SEARCH).glob("*") if path not in notes))


def _search(work: Work) -> None:
    job, part = work.job, work.recipe.search
    if part.plan is not None:
        Plan.load(part.plan).save(work.file(PLAN))
        check_edited(work)
        return
    if work.narrow_enough:
        work.listener.note("narrowing alone keeps to the budget; no ranks are chosen")
        Plan({}).save(work.file(PLAN))
        return
    check_reachable(limits_of(work.space, work.budget, work.budgeted))
    if work.session.agree(not work.file(EVIDENCE).exists()):
        with work.listener.working(f"choosing ranks by method {part.method}") as (on_step, on_progress):
            found = search(
                work.network,
                work.space,
                budget=work.budget,
                cost=work.budgeted,
                method=part.method,
                settings=method_settings(part),
                train=job.train,
                val=job.val,
                loss=job.loss,
                inputs=job.inputs,
                moments=work.moments(work.space.open_layers),
                training=search_training(work.recipe),
                folder=work.file(SEARCH),
                on_progress=on_progress,
                on_step=on_step,
                session=work.session,
                rehearsal=rehearsal(work),
            )
        if work.session.is_main:
            found.evidence.save(work.file(EVIDENCE))
    if work.session.is_main:
        assert work.evidence is not None
        choose(work, work.evidence).plan.save(work.file(PLAN))


def _search_files(work: Work) -> list[str]:
    return [name for name in (EVIDENCE, CHECKS, PLAN) if work.file(name).exists()]


# apply


def _apply(work: Work) -> None:
    plan = work.plan
    with work.listener.steps(f"factorising {len(plan.changes())} layers") as step:
        done = iter(range(1, len(plan.changes()) + 1))
        network = apply_plan(
            work.network,
            plan,
            moments=work.moments(plan.changes()),
            on_layer=lambda _: step(next(done), len(plan.changes())),
        )
    save(work.file(APPLIED), network, plan=plan)


def _apply_inputs(work: Work) -> Any:
    return [work.weights, digests(work, PLAN, SPACE), _looked_at(work), work.job.identity]


FIRST_STAGES = (
    Stage(
        "narrow",
        "taking channels out that others can stand in for",
        _narrow_inputs,
        _narrow,
        lambda work: [*saved(NARROWED), ORIGINAL, *([OUTCOME] if work.by_clock else [])],
        idle=lambda work: None if work.narrows else "narrow has no budget",
        clear=_narrow_clear,
    ),
    Stage(
        "inspect",
        "looking at the layers",
        lambda work: [work.weights, work.job.identity.get("example")],
        _inspect,
        lambda work: [LAYERS],
        clear=lambda work: remove(work, LAYERS),
        reread=lambda work: work.layers,
    ),
    Stage(
        "space",
        "listing the ranks on offer",
        _space_inputs,
        _space,
        lambda work: [SPACE],
        clear=lambda work: remove(work, SPACE),
        reread=lambda work: work.space,
    ),
    Stage(
        "table",
        "measuring the layers on the target",
        _table_inputs,
        _table,
        _table_files,
        idle=lambda work: None if work.target is not None else "no target is named",
        clear=_table_clear,
        reread=lambda work: work.costs,
    ),
    Stage(
        "search",
        "choosing the ranks",
        _search_inputs,
        _search,
        _search_files,
        clear=_search_clear,
        reread=check_edited,
        shared=lambda work: work.recipe.search.plan is None,
    ),
    Stage(
        "apply",
        "factorising the network",
        _apply_inputs,
        _apply,
        lambda work: saved(APPLIED),
        clear=lambda work: remove(work, APPLIED),
    ),
)
