"""The networks on the way, from the dense one to the exported files, as the report lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from haloc.pipeline.recover import networks
from haloc.pipeline.work import EXPORTS, Work

SMALL_FILE, DENSE_FILE = "export/model", "export/dense"
_SAID = {"applied": "factorised", "recalibrated": "… with new BatchNorm statistics", "finetuned": "… and fine-tuned"}
_SAID["reconstructed"] = "… reconstructed block by block"
_FILES = {"onnx": "as ONNX", "pt2": "as torch.export program"}


def variants(work: Work, figures: Mapping[str, Any], params: int) -> list[dict[str, Any]]:
    """A row per network: what it scores, takes and weighs."""
    scores, times = figures["scores"], times_on_target(work, figures)
    layers, before = work.layers, times.get(f"{DENSE_FILE}.onnx") or times.get("dense")
    rows = [_row("dense", scores.get("dense"), before, work.original.macs, work.original.params)]
    if work.narrows:
        rows.append(_row("narrowed", scores.get("narrowed"), None, layers.macs, layers.params))
    for name in networks(work):
        own = params if name == final(work) else layers.params_of(work.plan)
        rows.append(_row(_SAID[name], scores.get(name), None, layers.macs_of(work.plan), own))
    rows[-1]["latency_ms"] = times.get("model")  # where the target runs exported files, these have it
    for row in rows:
        row["latency_on"] = str(work.target) if row["latency_ms"] else None
    rows += [_exported(row) for row in export_facts(work, figures)]
    return [row | {"score": _shown(work, row["score"])} for row in rows]


def final(work: Work) -> str:
    """The name of the last of the networks."""
    return list(networks(work))[-1]


def times_on_target(work: Work, figures: Mapping[str, Any]) -> Mapping[str, Any]:
    """Latencies that were taken on the target itself; none where that is another machine."""
    found: Mapping[str, Any] = {} if work.timed_here is None else figures["latency"].get(str(work.target), {})
    return found


def exports_of(work: Work) -> list[dict[str, Any]]:
    """What was exported, and how close the files come to the network; files of an earlier run do not count."""
    if not work.recipe.export.formats or not work.file(EXPORTS).exists():
        return []
    rows: list[dict[str, Any]] = work.json(EXPORTS)["exports"]
    return rows


def export_facts(work: Work, figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The files of the compressed network."""
    return [_export(row, figures) for row in exports_of(work) if not row["path"].startswith(DENSE_FILE)]


def _row(name: str, score: float | None, latency: Any, macs: int, params: int) -> dict[str, Any]:
    return {"name": name, "score": score, "latency_ms": latency, "macs": macs, "params": params}


def _exported(row: Mapping[str, Any]) -> dict[str, Any]:
    name = "as int8 ONNX" if "int8" in row["path"] else _FILES[row["format"]]
    return {"name": name} | {key: row[key] for key in ("score", "latency_ms", "latency_on", "bytes", "parity")}


def _export(row: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    place = next((where for where, times in figures["latency"].items() if row["path"] in times), None)
    own = {key: row.get(key) for key in ("format", "path", "bytes", "dynamic_batch")}
    times = None if place is None else figures["latency"][place][row["path"]]
    told = {"latency_ms": times, "latency_on": place, "score": figures["scores"].get(row["path"])}
    return own | told | {"parity": _parity(row.get("parity") or {})}


def _parity(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """How far outputs differ, relative to their size, and how often the answer is the same."""
    differences = {name: found[name]["relative"] for name in ("random", "real") if found.get(name)}
    answers = (found[name].get("same_answer") for name in ("real", "random") if found.get(name))
    same = next((answer for answer in answers if answer is not None), None)
    return {**differences, "same_answer": same} if differences else None


def _shown(work: Work, score: float | None) -> float | None:
    """Accuracies as percentages, scores as they are."""
    return 100 * score if score is not None and work.job.score is None else score
