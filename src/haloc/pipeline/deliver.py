"""The last stages: files that run without HALOC, what they are worth, and the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from haloc.artifact.export import export
from haloc.artifact.quantise import quantise
from haloc.artifact.runtime import open_exported, time_files
from haloc.artifact.store import save
from haloc.cost.deploy import at_batch
from haloc.cost.model import Estimate
from haloc.cost.network import time_models
from haloc.cost.runtimes import SESSIONS
from haloc.cost.target import Target
from haloc.errors import CostError, ExportError, MissingExtraError, ModelError
from haloc.factor.forward import batch_size, to_device
from haloc.files import replacing, write_json
from haloc.pipeline.facts import gather
from haloc.pipeline.recover import RECOVERY_STAGES, finished, networks
from haloc.pipeline.stage import Stage, digests, remove, saved
from haloc.pipeline.stages import FIRST_STAGES
from haloc.pipeline.variants import exports_of
from haloc.pipeline.work import (
    CHECKS,
    EVIDENCE,
    EXPORT,
    EXPORTS,
    FIGURES,
    LAYERS,
    MODEL,
    NETWORKS,
    PAGE,
    PLAN,
    REPORT,
    SPACE,
    SUMMARY,
    TABLE,
    Work,
)
from haloc.report.page import render
from haloc.report.summary import markdown

#: What the exported files are called.
SMALL, DENSE, INT8 = "model", "dense", "model-int8"


# export


def _export_inputs(work: Work) -> Any:
    part = work.recipe.export
    told = [sorted(part.formats), part.int8, part.samples, None if work.target is None else work.target.batch_size]
    return [work.weights, digests(work, *saved(finished(work))[:2]), told, work.job.identity]


def _export(work: Work) -> None:
    part, folder = work.recipe.export, work.file(EXPORT)
    small, (dense, example) = work.saved(finished(work)).cpu(), work.job.on_cpu()
    samples = [to_device(inputs, torch.device("cpu")) for inputs in work.job.samples(part.samples)]
    rows: list[dict[str, Any]] = []
    wanted = [(SMALL, small, suffix) for suffix in part.formats] + [(DENSE, dense, suffix) for suffix in part.formats]
    with work.listener.steps("exporting, and comparing outputs") as step:
        for number, (name, network, suffix) in enumerate(wanted):
            step(number, len(wanted) + part.int8)
            rows.append({"name": name} | _exported_as(work, network, folder / f"{name}.{suffix}", example, samples))
        if part.int8:
            step(len(wanted), len(wanted) + 1)
            rows.append({"name": INT8} | _quantised(folder, samples or [example]))
    rows = [row | {"path": f"{EXPORT}/{Path(row['path']).name}"} for row in rows]
    write_json(work.file(EXPORTS), {"exports": rows})


def _exported_as(work: Work, network: nn.Module, path: Path, example: Any, samples: list[Any]) -> dict[str, Any]:
    """A file that takes any batch; where the network fixes its batch, that of the target."""
    found = export(network, path, example, samples=samples or None)
    batch = 1 if work.target is None else work.target.batch_size
    if not found.dynamic_batch and batch != batch_size(example):
        with suppress(ExportError, ModelError):  # the network itself wants the batch that it was given
            found = export(network, path, at_batch(example, batch), samples=samples or None, dynamic_batch=False)
    return found.to_dict()


def _quantised(folder: Path, samples: list[Any]) -> dict[str, Any]:
    """The ONNX file in 8 bits, described as the others are."""
    found = quantise(folder / f"{SMALL}.onnx", folder / f"{INT8}.onnx", samples).to_dict()
    return found | {"format": "onnx", "dynamic_batch": None, "parity": {"real": found["parity"]}}


def _export_files(work: Work) -> list[str]:
    return [EXPORTS, *(row["path"] for row in work.json(EXPORTS)["exports"])]


def check_extras(work: Work) -> None:
    """Says what has to be installed before anything long begins."""
    packages = {"onnx": "onnx", "onnxscript": "onnx", "onnxruntime": "onnx"} if "onnx" in _formats(work) else {}
    for package, extra in packages.items():
        try:
            __import__(package)
        except ImportError as error:
            raise MissingExtraError(package, extra) from error


def _formats(work: Work) -> tuple[str, ...]:
    return work.recipe.export.formats


# evaluate


def _evaluate_inputs(work: Work) -> Any:
    weights = [saved(place)[0] for place in networks(work).values()]
    exported = [row["path"] for row in exports_of(work)]
    target = None if work.target is None else work.target.to_dict()
    return [work.weights, digests(work, *weights, *exported, TABLE), target, work.job.identity, work.job.judging]


def _evaluate(work: Work) -> None:
    """Scores first, then latencies; each is kept once it is known, so that an interruption loses one."""
    known: dict[str, Any] = work.json(FIGURES) if work.file(FIGURES).exists() else {"scores": {}, "latency": {}}
    for name, network in _judged(work):
        if name not in known["scores"]:
            known["scores"][name] = _score(work, name, network())
            write_json(work.file(FIGURES), known)
    for key, times in _timed(work):
        if key not in known["latency"]:
            known["latency"][key] = {name: [value.value, value.error] for name, value in times().items()}
            write_json(work.file(FIGURES), known)
    write_json(work.file(FIGURES), known)


def _judged(work: Work) -> Iterator[tuple[str, Any]]:
    """The networks on the way by name, each with what makes it."""
    if not work.job.judged:
        return
    yield "dense", lambda: work.job.model
    if work.narrows:
        yield "narrowed", lambda: work.network
    for name, place in networks(work).items():
        yield name, lambda place=place: work.saved(place)
    for row in exports_of(work):
        if row["name"] != DENSE and row["format"] == "onnx":
            yield row["path"], lambda path=row["path"]: open_exported(work.file(path), trust=True)


def _score(work: Work, name: str, network: nn.Module) -> float:
    with work.listener.steps(f"judging {name}") as step:
        done, total = 0, (work.job.labels.get("data") or {}).get("test") or 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            step(done, total)

        return work.job.judge(network, advance if total else None)


def _timed(work: Work) -> Iterator[tuple[str, Any]]:
    """What is timed on which target, each with what does it."""
    target, files = work.timed_here, {row["path"]: work.file(row["path"]) for row in exports_of(work)}
    onnx = {path: file for path, file in files.items() if file.suffix == ".onnx"}
    session = target is not None and target.runtime in SESSIONS
    if target is not None and not (session and onnx):
        yield str(target), lambda: _time_models(work, target)
    if onnx:
        where = target if session else _beside(work.target)
        assert where is not None
        yield str(where), lambda: _time_files(work, onnx, where)
    programs = {path: file for path, file in files.items() if file.suffix == ".pt2"}
    if programs:
        torch_cpu = Target("cpu", batch_size=_beside(work.target).batch_size)
        yield f"torch.export:b{torch_cpu.batch_size}", lambda: _time_files(work, programs, torch_cpu)


def _beside(target: Target | None) -> Target:
    """Where ONNX files are timed of a network that is meant for something else."""
    return Target("cpu", runtime="onnxruntime", batch_size=1 if target is None else target.batch_size)


def _time_models(work: Work, target: Target) -> dict[str, Estimate]:
    dense, example = work.job.on_cpu()
    with work.listener.steps(f"timing both networks on {target}"):
        return time_models({"dense": dense, SMALL: work.saved(finished(work)).cpu()}, example, target)


def _time_files(work: Work, files: dict[str, Path], target: Target) -> dict[str, Estimate]:
    with work.listener.steps(f"timing the exported files on {target}") as step:
        try:
            return time_files(files, work.job.on_cpu()[1], target, on_progress=step)
        except CostError as error:  # a file for one batch only, say; it is there all the same
            work.listener.note(f"the exported files could not be timed on {target}: {error}")
            return {}


# report


def _report_inputs(work: Work) -> Any:
    files = (LAYERS, SPACE, TABLE, NETWORKS, EVIDENCE, CHECKS, PLAN, EXPORTS, FIGURES, *saved(finished(work))[:2])
    return [digests(work, *files), work.recipe.to_dict(), dict(work.job.labels)]


def _report(work: Work) -> None:
    facts = gather(work)
    provenance = {"recipe": work.recipe.to_dict(), "verdict": facts["verdict"], "figures": facts["figures"]}
    provenance |= {"target": facts["target"], "environment": facts["environment"]}
    save(work.file(MODEL), work.saved(finished(work)), plan=work.plan, provenance=provenance)
    write_json(work.file(REPORT), facts)
    _write(work.file(PAGE), render(facts))
    _write(work.file(SUMMARY), markdown(facts))


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


STAGES = (
    *FIRST_STAGES,
    *RECOVERY_STAGES,
    Stage(
        "export",
        "writing files that run without HALOC",
        _export_inputs,
        _export,
        _export_files,
        idle=lambda work: None if work.recipe.export.formats else "export.formats is empty",
        clear=lambda work: remove(work, EXPORT),
    ),
    Stage(
        "evaluate",
        "judging and timing all networks",
        _evaluate_inputs,
        _evaluate,
        lambda work: [FIGURES],
        clear=lambda work: remove(work, FIGURES),
    ),
    Stage(
        "report",
        "writing the report",
        _report_inputs,
        _report,
        lambda work: [REPORT, PAGE, SUMMARY, *saved(MODEL)],
        clear=lambda work: remove(work, REPORT, PAGE, SUMMARY, MODEL),
    ),
)
