"""Times networks beside the dense one they were made from, predicts them, and keeps both.

    python benchmarks/imagenet/speed.py resnet18 benchmarks/imagenet/plans/resnet18-70.json runs/mine \
        --targets cpu:onnxruntime:b1 cpu:openvino:b1 --output benchmarks/imagenet/speed/resnet18-224-cpu.json

A network is a plan, a file of what was narrowed, or a folder that `haloc compress` left; weights are random. A
prediction knows the rows of all layers, and whole networks in which only some of the changes are made, never all of
them: what `haloc measure --plan` and `haloc predict` do, for narrowed networks too. All networks take turns, so that
what is predicted and what is measured belong to the same state of the machine. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import haloc
from haloc.artifact.store import read_card
from haloc.cost.deploy import sketch
from haloc.cost.network import fitted_times, left_out_error
from haloc.cost.plans import plan_rows, some_of
from haloc.files import read_json, write_json
from haloc.forms import stages
from haloc.inventory import Inventory
from haloc.narrowing import Narrowed, resized
from haloc.narrowing.hidden import narrowed_from

#: Whole networks that are timed for one prediction, the dense one among them.
NETWORKS = {"cpu": 9, "cuda": 7}

#: What was done to a network: a group of channels narrowed, or a layer written in a form.
Change = Narrowed | tuple[str, haloc.Form]
Pair = dict[str, list[float]]
Row = dict[str, Any]


def changes_of(place: Path) -> tuple[Change, ...]:
    """What makes the network out of the dense one."""
    if place.is_file():
        narrowed = read_json(place).get("narrowed")
        return tuple(haloc.Plan.load(place).changes().items()) if narrowed is None else narrowed_from(narrowed)
    folder = place / "model" if (place / "model").is_dir() else place
    plan = haloc.Plan.load(folder / "plan.json")
    return (*narrowed_from(read_card(folder)["narrowed"]), *plan.changes().items())


@dataclass(frozen=True, eq=False)
class Made:
    """The dense network with some changes.

    Attributes:
        network: It, with random weights.
        layers: Its layers before they were written in forms.
        plan: Those forms.
    """

    network: nn.Module
    layers: Inventory
    plan: haloc.Plan

    @classmethod
    def of(cls, dense: nn.Module, changes: Iterable[Change], example: torch.Tensor) -> Made:
        changes = tuple(changes)
        narrowed = resized(dense, [each for each in changes if isinstance(each, Narrowed)]).eval()
        plan = haloc.Plan(dict(each for each in changes if not isinstance(each, Narrowed)))
        return cls(sketch(narrowed, plan).eval(), haloc.inspect(narrowed, example), plan)

    def features(self, rows: haloc.Table) -> list[float]:
        """As `NetworkCost` has them: one, the sum of the rows, and how many layers run one after the other."""
        forms = [(call, self.plan.get(layer.name, haloc.Dense())) for layer in self.layers for call in layer.calls]
        return [1.0, self.sum_of(rows).value, sum(len(stages(*pair)) for pair in forms)]

    def sum_of(self, rows: haloc.Table) -> haloc.Estimate:
        return haloc.layers_cost(self.layers, self.plan, rows)

    def corrected(self, rows: haloc.Table, slopes: np.ndarray, error: float) -> list[float]:
        """What the whole network takes, and how far off that may be."""
        value = float(self.features(rows) @ slopes)
        return rounded(value, hypot(error * value, self.sum_of(rows).error))


def between(dense: nn.Module, changes: Sequence[Change], count: int, example: torch.Tensor) -> list[Made]:
    """Networks with some of the changes, from few to all but one."""
    return [Made.of(dense, some, example) for some in some_of(changes, count)]


def table_of(networks: Iterable[Made], target: haloc.Target) -> haloc.Table:
    """All rows of these networks, equal ones once."""
    rows = dict.fromkeys(row for made in networks for row in plan_rows(made.layers, [made.plan]))
    return haloc.measure(list(rows), target)


def compared(
    dense: nn.Module, saved: Mapping[str, Sequence[Change]], example: torch.Tensor, target: haloc.Target, count: int
) -> Iterator[tuple[str, Pair, Pair]]:
    """For each of the networks what is predicted of it and of the dense one, and what the clock says of both.

    The dense network and ``count`` − 1 between it and a saved one tell the prediction of that.
    """
    plain = Made.of(dense, (), example)
    final = {name: Made.of(dense, changes, example) for name, changes in saved.items()}
    known = {name: [plain, *between(dense, changes, count - 1, example)] for name, changes in saved.items()}
    every = dict.fromkeys([plain, *(made for some in known.values() for made in some), *final.values()])
    rows = table_of(every, target)
    times = haloc.time_models({str(number): made.network for number, made in enumerate(every)}, example, target)
    clock = {made: times[str(number)].value for number, made in enumerate(every)}
    for name, made in final.items():
        fit = np.array([each.features(rows) for each in known[name]]), np.array([clock[each] for each in known[name]])
        how = fitted_times(*fit), left_out_error(*fit)
        told = {"dense": plain.corrected(rows, *how), "plan": made.corrected(rows, *how)}
        yield name, told, {"dense": rounded(clock[plain]), "plan": rounded(clock[made])}


def modelled(
    dense: nn.Module, saved: Mapping[str, Sequence[Change]], example: torch.Tensor, target: haloc.Target
) -> dict[str, Pair]:
    """What the model of a chip says."""
    plain, final = Made.of(dense, (), example), {name: Made.of(dense, each, example) for name, each in saved.items()}
    rows = table_of([plain, *final.values()], target)
    before = rounded(plain.sum_of(rows).value)
    return {name: {"dense": before, "plan": rounded(made.sum_of(rows).value)} for name, made in final.items()}


def rounded(*values: float) -> list[float]:
    return [round(value, 4) for value in values]


def rows_of(
    dense: nn.Module, saved: Mapping[str, Sequence[Change]], target: str, options: argparse.Namespace
) -> Iterator[Row]:
    """Every saved network on one target."""
    where, example = haloc.Target.parse(target), torch.randn(1, 3, options.size, options.size)
    of = {"network": options.network, "size": options.size, "target": target}
    if where.device == "asic":
        for name, pair in modelled(dense, saved, example, where).items():
            yield {**of, "plan": name, "latency_ms": pair}
        return
    count = options.networks or NETWORKS[where.device]
    for name, told, clock in compared(dense, saved, example, where, count):
        yield {**of, "plan": name, "latency_ms": told, "measured_ms": clock}


def keep(path: Path, rows: Iterable[Row]) -> None:
    """Puts rows into a file, in the places of those of the same networks there; what else it has stays."""
    file = read_json(path) if path.exists() else {"rows": []}
    known = {_key(row): row for row in file["rows"]} | {_key(row): row for row in rows}
    write_json(path, {**file, "rows": list(known.values())})


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("network", "plan", "target", "size"))


def on_each(targets: Iterable[str], work: Callable[[str], None]) -> None:
    """Does the work for one target after the other; where it fails, the reason is printed and the others go on."""
    failed = 0
    for target in targets:
        try:
            work(target)
        except Exception as error:  # out of memory, a missing runtime, …: of whatever kind, the others may well run
            failed += 1
            reason = next(iter(str(error).splitlines()), "")
            print(f"{target} FAILED, nothing more is kept of it: {type(error).__name__}: {reason}", flush=True)
    if failed:
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network")
    parser.add_argument("places", nargs="+", type=Path)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--targets", nargs="+", required=True)
    parser.add_argument("--networks", type=int, help="whole networks timed for a prediction; as a rule 9, on a GPU 7")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    dense = haloc.create(options.network, num_classes=options.classes).eval()
    saved = {place.name.removesuffix(".json").removesuffix(".narrowed"): changes_of(place) for place in options.places}

    def work(target: str) -> None:
        rows = list(rows_of(dense, saved, target, options))
        keep(options.output, rows)
        for row in rows:
            print(row, flush=True)

    on_each(options.targets, work)


if __name__ == "__main__":
    main()
