"""ResNet-20 on CIFAR-10 without fine-tuning: all methods that choose ranks without training, at 50% and 30% of MACs.

Chosen from all forms and from Tucker-2 alone, ranks in steps of 4, factors from activations. What a method looks at are
training images; then the BatchNorm statistics are measured anew on 2,000 augmented training images, and accuracy is
top-1 on the 10,000 test images. Seconds are of one CPU thread and have everything in them that it takes to choose: the
calibration, where a method uses it, the factorisation of the candidates and the search. "Responses" weigh the errors of
a layer's outputs by what comes of them in the network's.

Bars: the best method at least 87.5% at half of the MACs and 74% at 30%; `sensitivity` at most 120 CPU seconds. Rows of
`sensitivity` with other settings show what these do, and do not count.

A row that is in the file is not measured again (``--afresh`` does).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import console, save, verdict, weights_file
from rich.progress import track
from rich.table import Table
from torch import nn

import haloc
from haloc.files import read_json
from haloc.methods.genetic import GeneticSettings
from haloc.methods.search import SearchResult, search, solve
from haloc.methods.sensitivity import SensitivitySettings
from haloc.space import rank_space
from haloc.zoo import IMAGENET, Splits, create, load_data

SPACES = {"all forms": ("tucker2", "tucker2-out", "tucker2-in", "spatial", "svd"), "Tucker-2": ("tucker2",)}
BUDGETS = (0.5, 0.3)


@dataclass(frozen=True)
class Case:
    """A method as it is run here.

    Attributes:
        method: Its name.
        settings: What it is told, other than the defaults.
        calibrated: Whether it looks at the calibration.
        responses: Whether errors are weighted by what comes of them, in its choice and in the factors.
        step: Ranks on offer are multiples of this.
        spaces: What it chooses from.
    """

    method: str
    settings: Any = None
    calibrated: bool = True
    responses: bool = False
    step: int = 4
    spaces: tuple[str, ...] = tuple(SPACES)


CASES = {
    "sensitivity": Case("sensitivity"),
    "genetic": Case("genetic", GeneticSettings(population=16, generations=16, images=192)),
    "energy": Case("energy"),
    **{name: Case(name, calibrated=False) for name in ("alds", "vbmf", "uniform", "random")},
    "sensitivity, responses": Case("sensitivity", responses=True),
    "energy, responses": Case("energy", responses=True),
    "sensitivity, 64 images": Case("sensitivity", SensitivitySettings(images=64), spaces=("all forms",)),
    "sensitivity, T = 1": Case("sensitivity", SensitivitySettings(temperature=1), spaces=("all forms",)),
    "sensitivity, loss": Case("sensitivity", SensitivitySettings(measure="loss"), spaces=("all forms",)),
    "sensitivity, steps of 2": Case("sensitivity", step=2, spaces=("all forms",)),
}
CALIBRATION_IMAGES, RECALIBRATION_IMAGES = 1000, 2000
BARS = {0.5: 0.875, 0.3: 0.74}
SECONDS_BAR = 120


def images(data: Splits, batch: int, count: int | None, seed: int = 0) -> Any:
    """Training images as training saw them: padded with black, cropped, flipped."""
    return data.train.batches(batch, normalisation=IMAGENET, augment=True, shuffle=True, seed=seed, limit=count)


class Measuring:
    """One network, its data and calibration; a method is run once per space, or per budget where it has to be."""

    def __init__(self, model: nn.Module, data: Splits) -> None:
        self.model, self.data = model, data
        self.layers = haloc.inspect(model, torch.zeros(1, 3, 32, 32))
        self._calibrated: dict[bool, tuple[dict[str, haloc.InputMoments], float]] = {}
        self._found: dict[tuple[str, str], tuple[SearchResult, float]] = {}

    def calibrated(self, responses: bool) -> tuple[dict[str, haloc.InputMoments], float]:
        """What the layers' inputs look like, and in how many CPU seconds that was found out."""
        if responses not in self._calibrated:
            start = time.process_time()
            names = [layer.name for layer in self.layers if layer.families]
            some = images(self.data, 250, CALIBRATION_IMAGES)
            moments = haloc.calibrate(self.model, some, names, responses=responses)
            self._calibrated[responses] = moments, time.process_time() - start
        return self._calibrated[responses]

    def row(self, name: str, space: str, budget: float) -> dict[str, Any]:
        moments, _ = self.calibrated(CASES[name].responses)
        found, seconds = self.chosen(name, space, budget)
        network = haloc.apply_plan(self.model, found.plan, moments=moments)
        haloc.recalibrate(network, images(self.data, 250, RECALIBRATION_IMAGES))
        accuracy = haloc.evaluate(network, self.data.test.batches(500, normalisation=IMAGENET))
        return {
            "method": name,
            "space": space,
            "budget": budget,
            "macs": found.spending[0].remains,
            "params": self.layers.params_of(found.plan) / self.layers.params,
            "top1": accuracy.top1,
            "cpu_s": seconds,
            "plan": {layer: str(form) for layer, form in found.plan.items()},
        }

    def chosen(self, name: str, space: str, budget: float) -> tuple[SearchResult, float]:
        """What a method finds, and in how many CPU seconds; what it found for one budget serves for the other."""
        case, key = CASES[name], (name, space)
        if key in self._found and self._found[key][0].evidence.rule != "seen":
            found, seconds = self._found[key]
            return solve(found.evidence, budget), seconds
        moments, calibration_s = self.calibrated(case.responses)
        start = time.process_time()
        offered = rank_space(self.layers, forms=SPACES[space], round_to=case.step)
        held = images(self.data, 96, None, seed=1)
        found = search(
            self.model, offered, budget=budget, method=case.method, settings=case.settings, train=held, val=held,
            moments=moments if case.calibrated else None,
        )  # fmt: skip
        seconds = time.process_time() - start + case.calibrated * calibration_s
        self._found[key] = found, seconds
        return found, seconds


def missing(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, float]]:
    known = {(row["method"], row["space"], row["budget"]) for row in rows}
    for name, case in CASES.items():
        for space in case.spaces:
            yield from ((name, space, budget) for budget in BUDGETS if (name, space, budget) not in known)


def measure(weights: Path, data_root: Path | None, results: dict[str, Any]) -> None:
    """Measures the rows that are missing and saves after each."""
    left = list(missing(results["rows"]))
    if not left:
        return
    torch.set_num_threads(1)
    measuring = Measuring(create("resnet20", weights=weights).eval(), load_data("cifar10", root=data_root))
    for case in track(left, description="networks", console=console, transient=True):
        results["rows"].append(measuring.row(*case))
        save(__file__, results)


def rows_table(results: dict[str, Any]) -> Table:
    table = Table(title="ResNet-20, CIFAR-10, no fine-tuning: top-1 on 10,000 test images (dense 91.73%)")
    for column in ("method", "chosen from", "budget", "MACs", "params", "top-1", "CPU s to choose"):
        table.add_column(column, justify="left" if column in ("method", "chosen from") else "right")
    for space in SPACES:
        for budget in BUDGETS:
            table.add_section()
            rows = [row for row in results["rows"] if (row["space"], row["budget"]) == (space, budget)]
            for row in sorted(rows, key=lambda row: -row["top1"]):
                cells = [f"{row[key]:.1%}" for key in ("macs", "params")]
                cells = [f"{budget:.0%}", *cells, f"{row['top1']:.2%}", f"{row['cpu_s']:.0f}"]
                table.add_row(row["method"], space, *cells)
    return table


def bars_table(results: dict[str, Any]) -> Table:
    table = Table(title="Bars")
    for column in ("what", "measured", "bar", ""):
        table.add_column(column)
    plain = [row for row in results["rows"] if row["method"] == CASES[row["method"]].method]
    for budget, bar in BARS.items():
        best = max((row for row in plain if row["budget"] == budget), key=lambda row: row["top1"])
        what = f"best top-1 at {budget:.0%} of the MACs ({best['method']}, {best['space']})"
        table.add_row(what, f"{best['top1']:.2%}", f"≥ {bar:.1%}", verdict(best["top1"] >= bar))
    seconds = max(row["cpu_s"] for row in results["rows"] if row["method"] == "sensitivity")
    table.add_row("sensitivity, CPU seconds", f"{seconds:.0f}", f"≤ {SECONDS_BAR}", verdict(seconds <= SECONDS_BAR))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="folder with the weights file")
    parser.add_argument("--data-root", type=Path, default=None, help="folder with CIFAR-10")
    parser.add_argument("--afresh", action="store_true", help="measure all rows again")
    options = parser.parse_args()
    path = Path(__file__).with_suffix(".json")
    known = read_json(path) if path.is_file() and not options.afresh else {"rows": []}
    results = {key: value for key, value in known.items() if key != "machine"}
    measure(weights_file(options.weights, "resnet20-cifar10.safetensors"), options.data_root, results)
    for table in (rows_table(results), bars_table(results)):
        console.print(table)


if __name__ == "__main__":
    main()
