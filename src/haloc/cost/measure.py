"""`measure`: a table of what every layer of a space costs on a target."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

from haloc.cost.accelerators import Hardware, as_hardware
from haloc.cost.asic import AsicCost, asic_costs
from haloc.cost.eyeriss import EYERISS
from haloc.cost.machine import environment, identity
from haloc.cost.runtimes import torch_settings
from haloc.cost.sampling import Journal, measure_rows, schedule_of
from haloc.cost.table import MOST_ROWS, Row, Table
from haloc.cost.target import Target
from haloc.errors import CostError, MissingExtraError, SpecError
from haloc.forms import Form, form_to_dict, stages
from haloc.locks import file_at_work
from haloc.shapes import ConvShape, Shape, shape_to_dict
from haloc.space import RankSpace

RowKey = tuple[Shape, Form]
#: Called with how many units of work are done and how many there are in all.
Progress = Callable[[int, int], None]

_log = logging.getLogger("haloc")


def measure(
    space: RankSpace | Sequence[RowKey],
    target: Target,
    *,
    path: str | Path | None = None,
    hardware: Hardware | Path = EYERISS,
    engine: str = "auto",
    on_progress: Progress | None = None,
) -> Table:
    """Measures every layer of a space, as deployed, in each of its forms.

    Equal layers are measured once. With a ``path`` the work is kept as it goes: killed and started again it loses at
    most the visit in flight, and a table that is already there is added to.

    Args:
        space: What `rank_space` returned, or the (shape, form) pairs themselves.
        target: Where the layers run.
        path: The table file.
        hardware: For target asic, the accelerator: `Eyeriss` with its settings, or the path of a ZigZag description.
        engine: For target asic, what prices it: see `asic_costs`.
        on_progress: Called with the visits done and to be done.

    Returns:
        The table, with the rows that were in the file before.
    """
    wanted = space.rows() if isinstance(space, RankSpace) else tuple(space)
    if len(wanted) > MOST_ROWS:
        raise SpecError(f"a table has at most {MOST_ROWS:,} rows, these would be {len(wanted):,}; offer fewer ranks")
    if target.device != "asic":
        check_available(target)
    with nullcontext() if path is None else file_at_work(Path(path)):
        if target.device == "asic":
            return _simulated(wanted, target, path, as_hardware(hardware), engine, on_progress)
        return _measured(wanted, target, path, on_progress)


def _measured(wanted: Sequence[RowKey], target: Target, path: str | Path | None, on_progress: Progress | None) -> Table:
    """The table of this machine."""
    machine = environment(target.to_dict())
    known = _known(path, target, machine)
    missing = [key for key in wanted if key not in known]
    if not missing:
        if path and Path(f"{path}.rows").exists():  # of a run that was killed when the table was just written
            Journal(f"{path}.rows", identity(target.to_dict(), machine)).forget(_keys(known))
        return known
    with tempfile.TemporaryDirectory() as scratch:
        journal = Journal(f"{path}.rows" if path else f"{scratch}/rows", identity(target.to_dict(), machine))
        rows = [bench_row(shape, form) for shape, form in missing]
        rounds = schedule_of(target.to_dict()).rounds
        with torch_settings(target.to_dict()):
            results, failures = measure_rows(
                rows, target.to_dict(), journal, on_visit=visit_counter(len(rows), rounds, journal, on_progress)
            )
        _report(failures, len(rows), target)
        measured = tuple(
            Row(*key, **results[row["key"]]) for key, row in zip(missing, rows, strict=True) if row["key"] in results
        )
        table = known.merged(Table(target, measured, machine))
        if path:
            table.save(path)
        journal.forget(_keys(table))
    return table


def _keys(table: Table) -> set[str]:
    return {bench_row(row.shape, row.form)["key"] for row in table.rows}


def _simulated(
    wanted: Sequence[RowKey],
    target: Target,
    path: str | Path | None,
    hardware: Hardware,
    engine: str,
    on_progress: Progress | None,
) -> Table:
    """The table of an accelerator: priced by an engine instead of a clock."""
    machine: dict[str, Any] = {"device": str(hardware), "hardware": hardware.digest}
    known = _known(path, target, machine)
    missing = [key for key in wanted if key not in known]
    if not missing:
        return known
    done = count(1)

    def priced(_: int, __: AsicCost) -> None:
        if on_progress is not None:
            on_progress(next(done), len(missing))

    cache = f"{path}.rows" if path else None
    costs = asic_costs(missing, hardware, engine=engine, cache=cache, on_row=priced)
    machine["engine"] = costs[0].engine
    if known.rows:
        same_machine(str(path), known.environment, machine)
    rows = tuple(
        Row(shape, form, latency_ms=cost.latency_ms, energy_mj=cost.energy_mj)
        for (shape, form), cost in zip(missing, costs, strict=True)
    )
    table = known.merged(Table(target, rows, machine))
    if path:
        table.save(path)
        Path(f"{path}.rows").unlink(missing_ok=True)
    return table


def bench_row(shape: Shape, form: Form) -> dict[str, Any]:
    """A row as the kit and the sampler know it: plain values, and the chain of stages to run."""
    return {
        "key": f"{label(shape)} {form}",
        "group": label(shape),
        "shape": shape_to_dict(shape),
        "form": form_to_dict(form),
        "stages": [shape_to_dict(stage) for stage in stages(shape, form)],
    }


def label(shape: Shape) -> str:
    """A shape in one short word, different for different shapes."""
    if not isinstance(shape, ConvShape):
        bias = "" if shape.bias else "-nobias"
        return f"linear{shape.in_features}-{shape.out_features}p{shape.positions}{bias}"
    parts = {"k": shape.kernel, "s": shape.stride, "p": shape.padding, "d": shape.dilation, "@": shape.input_size}
    words = [f"conv{shape.in_channels}-{shape.out_channels}"]
    words += [
        f"{name}{value if isinstance(value, str) else 'x'.join(map(str, value))}" for name, value in parts.items()
    ]
    words += [f"g{shape.groups}"] if shape.groups > 1 else []
    words += [f"n{shape.images}"] if shape.images > 1 else []
    words += [shape.padding_mode] if shape.padding_mode != "zeros" else []
    return "-".join(words if shape.bias else [*words, "nobias"])


def check_available(target: Target) -> None:
    """Says in one sentence what this machine lacks for the target."""
    extras = {"onnxruntime": "onnx", "openvino": "openvino"}
    if target.runtime in extras:
        try:
            __import__(target.runtime)
        except ImportError as error:
            raise MissingExtraError(target.runtime, extras[target.runtime]) from error
    elif target.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise SpecError(
                f"target {target} needs a CUDA device, and there is none here; write a kit for the machine that has "
                "one (haloc measure --kit), or choose a cpu target"
            )


def _known(path: str | Path | None, target: Target, machine: dict[str, Any]) -> Table:
    """The table that is already there, if it belongs to the same target on the same machine."""
    if path is None or not Path(path).exists():
        return Table(target, (), machine)
    table = Table.load(path)
    if table.target != target:
        raise SpecError(f"{path} is a table for {table.target}, not for {target}; choose another file")
    same_machine(path, table.environment, machine)
    return table


def same_machine(path: str | Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to add to what was measured elsewhere or with other versions."""
    for name in ("device", "cores", "torch", "onnxruntime", "openvino", "driver", "threads", "hardware", "engine"):
        if name in now and before.get(name) != now.get(name):
            raise SpecError(
                f"{path} was measured with {name} {before.get(name)!r}, here it is {now.get(name)!r}, and times of "
                "both do not compare; choose another file or remove this one"
            )


def visit_counter(rows: int, rounds: int, journal: Journal, on_progress: Progress | None) -> Callable[[int], None]:
    """Counts visits for a progress bar, those of a run that was killed included; rows visited again come on top."""
    done, total = journal.visits(rounds), rows * rounds

    def visited(more: int) -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, max(total, done + more))

    return visited


def _report(failures: dict[str, str], total: int, target: Target) -> None:
    """Rows that cannot run on the target are left out of the table, and said so; if that is all of them, it is over."""
    if len(failures) == total:
        raise CostError(f"not one of {total} rows could be run on {target}: {next(iter(failures.values()))}")
    for key, reason in failures.items():
        _log.warning("not measured on %s: %s: %s", target, key, reason)
