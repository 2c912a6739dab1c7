"""What is to be reached on CIFAR-10, what was measured, and whether that is enough; from committed files.

Bars (mean of three seeds, test images): ResNet-20 ≥ 91.8% at ≥ 72.2% fewer multiply-adds and ≥ 76.1% fewer parameters,
VGG-16 ≥ 93.9% at ≥ 86.44% and ≥ 98.56%, each with a floor below which it is not done; HALOC's plan ahead of every other
method's by the same recipe; at most 360 seconds for the whole flow of ResNet-20; with a budget of latency networks that
are faster than those with a budget of multiply-adds, and no less accurate, in fp16 at batch 128 and 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from haloc.files import read_json

HERE = Path(__file__).resolve().parent
SEARCHES = HERE.parent / "search"
NOT_MEASURED = "[yellow]not measured yet[/]"
SEEDS = 3
FLOW_BAR_S = 360.0
BATCHES = (128, 1)


@dataclass(frozen=True)
class Goal:
    """What is to be reached for a network.

    Attributes:
        title: Its name in the paper.
        top1: The bar, in percent.
        floor: Below this it is not done.
        macs: How many percent of its multiply-adds have to go.
        params: And of its parameters.
    """

    title: str
    top1: float
    floor: float
    macs: float
    params: float


GOALS = {
    "resnet20": Goal("ResNet-20", 91.8, 91.4, 72.20, 76.10),
    "vgg16": Goal("VGG-16", 93.9, 93.2, 86.44, 98.56),
}

#: The paper's Table 1, all rows: top-1 in percent, percent fewer multiply-adds (its "FLOPs") and parameters.
PAPER: dict[str, dict[str, tuple[float, float | None, float | None]]] = {
    "resnet20": {
        "uncompressed": (91.25, None, None),
        "HALOC": (91.32, 72.20, 76.10),
        "ALDS": (90.92, 67.86, 74.91),
        "LCNN": (90.13, 66.78, 65.38),
        "PSTR-S": (90.80, None, 60.87),
        "Std. Tucker": (87.41, None, 61.54),
    },
    "vgg16": {
        "uncompressed": (92.78, None, None),
        "HALOC": (93.16, 86.44, 98.56),
        "ALDS": (92.67, 86.23, 95.77),
        "LCNN": (92.72, 85.47, 91.14),
        "DECORE (pruning)": (92.44, 81.50, 96.60),
        "Spike-Thrift (pruning)": (91.79, None, 97.01),
    },
}
#: Reported since: NORTON (2024), from an uncompressed network of 93.96%.
LATER = {"vgg16": {"NORTON (2024), from 93.96": (93.84, 88.0, 87.0)}}


@dataclass(frozen=True)
class Run:
    """A row of a comparison: one recipe with all its seeds.

    Attributes:
        name: The method.
        values: Top-1 of every seed, in percent.
        macs: The share of the multiply-adds that is left, of the largest network.
        params: And of the parameters.
    """

    name: str
    values: tuple[float, ...]
    macs: float
    params: float

    @property
    def top1(self) -> float:
        return fmean(self.values)

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds; 0 of one."""
        return stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def said(self) -> str:
        scatter = f" ± {self.spread:.2f}" if len(self.values) > 1 else ""
        return f"{self.top1:.2f}{scatter}%"


@dataclass(frozen=True)
class Bar:
    """Something that is to hold.

    Attributes:
        text: What.
        figure: What was measured, in words.
        held: Whether it does; None where that has not been measured.
    """

    text: str
    figure: str = NOT_MEASURED
    held: bool | None = None


# --- reading ------------------------------------------------------------------------------------------------------


def found(path: Path) -> Any:
    """What is in a file, or nothing where there is none."""
    return read_json(path) if path.is_file() else None


def runs_of(path: Path, network: str) -> dict[str, Run]:
    """The rows of a comparison by their methods; those without a score are left out."""
    rows = (found(path) or {}).get("rows", [])
    runs = (_run(row, network) for row in rows if {"score", "macs", "params"} <= row["figures"].keys())
    return {run.name: run for run in runs}


def _run(row: Mapping[str, Any], network: str) -> Run:
    figures = row["figures"]
    shares = {key: max(figures[key]["values"]) / figures[key]["before"] for key in ("macs", "params")}
    return Run(row["name"].removeprefix(f"{network}-"), tuple(figures["score"]["values"]), **shares)


def final_of(folder: Path, network: str) -> Run | None:
    """The runs that the bars are about."""
    runs = runs_of(folder / "results" / f"{network}.json", network)
    return runs.get("haloc") or next(iter(runs.values()), None)


def screened(folder: Path, network: str) -> tuple[dict[str, Run], Any]:
    """All methods with one seed, and for how many epochs; for ResNet-20 `earlier` was enough."""
    path = folder / "results" / f"{network}-screen.json"
    return runs_of(path, network), (found(path) or {}).get("epochs")


def earlier() -> tuple[dict[str, Run], int]:
    """ResNet-20 at nearly the same budgets, as `benchmarks/search.py methods` measured it, and its epochs."""
    file = found(SEARCHES / "methods.json")
    seeds: dict[str, list[Mapping[str, Any]]] = {}
    for key, row in file["rows"].items():
        seeds.setdefault(key.rsplit(" ", 1)[0], []).append(row)
    return {name: _together(name, rows) for name, rows in seeds.items()}, file["finetuning"]["epochs"]


def _together(name: str, rows: Sequence[Mapping[str, Any]]) -> Run:
    values = tuple(100 * row["top1"] for row in rows)
    return Run(name, values, max(row["macs"] for row in rows), max(row["params"] for row in rows))


# --- bars ---------------------------------------------------------------------------------------------------------


def bars_of(folder: Path) -> list[Bar]:
    """Every bar with what the files of a folder say of it."""
    bars = [bar for network, goal in GOALS.items() for bar in accuracy_bars(goal, final_of(folder, network))]
    for network, goal in GOALS.items():
        runs = runs_of(folder / "results" / f"{network}-methods.json", network)
        bars.append(ahead_bar(goal, runs))
    bars.append(flow_bar((found(folder / "results" / "flow.json") or {}).get("resnet20")))
    rows = (found(folder / "results" / "latency.json") or {}).get("rows", [])
    return bars + [bar for network in GOALS for batch in BATCHES for bar in latency_bars(network, batch, rows)]


def accuracy_bars(goal: Goal, run: Run | None) -> list[Bar]:
    """Accuracy and size; fewer seeds than three say nothing of the mean of three."""
    texts = [
        f"{goal.title}: top-1 ≥ {goal.top1}%, mean of {SEEDS} seeds",
        f"{goal.title}: top-1 ≥ {goal.floor}%, the floor",
        f"{goal.title}: ≥ {goal.macs}% fewer multiply-adds",
        f"{goal.title}: ≥ {goal.params}% fewer parameters",
    ]
    if run is None:
        return [Bar(text) for text in texts]
    enough = len(run.values) >= SEEDS
    said = run.said if enough else f"{run.said}, of {len(run.values)} seed{'s' * (len(run.values) > 1)} only"
    reached = [run.top1 >= bar if enough else None for bar in (goal.top1, goal.floor)]
    gone = [_gone(run.macs, goal.macs), _gone(run.params, goal.params)]
    figures = [said, said, _fewer(run.macs), _fewer(run.params)]
    return [Bar(*bar) for bar in zip(texts, figures, [*reached, *gone], strict=True)]


def _gone(left: float, percent: float) -> bool:
    """Whether so many percent are gone, but for the last bits of a float."""
    return left <= 1 - percent / 100 + 1e-9


def _fewer(left: float) -> str:
    return f"{100 * (1 - left):.2f}% fewer"


def ahead_bar(goal: Goal, runs: Mapping[str, Run]) -> Bar:
    """HALOC against the best of the others, and whether the seeds can tell them apart."""
    text = f"{goal.title}: HALOC's plan ahead of every other method's, by one recipe"
    others = [run for name, run in runs.items() if not name.startswith("haloc")]
    if "haloc" not in runs or not others:
        return Bar(text)
    best = max(others, key=lambda run: run.top1)
    own = runs["haloc"]
    beaten = sum(own.top1 > run.top1 for run in others)
    figure = f"ahead of {beaten} of {len(others)}; {lead_of(own, best)} against {best.name}"
    return Bar(text, figure, beaten == len(others))


def lead_of(own: Run, other: Run) -> str:
    """The difference in points, its standard error, and what that comes to."""
    lead = own.top1 - other.top1
    if min(len(own.values), len(other.values)) < 2:
        return f"{lead:+.2f} points, one seed"
    error = sqrt(own.spread**2 / len(own.values) + other.spread**2 / len(other.values))
    apart = "more" if abs(lead) > 2 * error else "not more"
    return f"{lead:+.2f} ± {error:.2f} points, {apart} than seeds explain"


def flow_bar(flow: Mapping[str, Any] | None) -> Bar:
    text = f"ResNet-20: the whole flow ≤ {FLOW_BAR_S:.0f} s on the GPU"
    if not flow:
        return Bar(text)
    seconds = sum(flow["stages"].values())
    return Bar(text, f"{seconds:.0f} s", seconds <= FLOW_BAR_S)


def latency_bars(network: str, batch: int, rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """One for every target of that batch size that networks were timed on."""
    own = [row for row in rows if row["network"] == network and {"fp16", f"b{batch}"} <= set(row["target"].split(":"))]
    targets = list(dict.fromkeys(row["target"] for row in own))
    texts = {target: f"{GOALS[network].title}, {target}: latency plan faster, no less accurate" for target in targets}
    if not targets:
        return [Bar(f"{GOALS[network].title}, fp16, batch {batch}: latency plan faster, no less accurate")]
    return [_against(text, {row["plan"]: row for row in own if row["target"] == t}) for t, text in texts.items()]


def _against(text: str, plans: Mapping[str, Mapping[str, Any]]) -> Bar:
    """The plan under a budget of latency against that under one of multiply-adds."""
    if not {"macs", "latency"} <= plans.keys() or None in (plans["macs"].get("top1"), plans["latency"].get("top1")):
        return Bar(text)
    macs, mine = plans["macs"], plans["latency"]
    gained, points = macs["latency_ms"] / mine["latency_ms"], percent(mine["top1"]) - percent(macs["top1"])
    error = macs.get("error_ms", 0.0) + mine.get("error_ms", 0.0)
    doubt = ", within the errors" if abs(macs["latency_ms"] - mine["latency_ms"]) <= error else ""
    same = mine.get("changed") == 0  # then nothing was gained by a plan
    figure = f"{gained:.2f} times as fast{doubt}, {points:+.2f} points{'; but it is the dense network' * same}"
    return Bar(text, figure, gained > 1 and points >= 0 and not same)


def percent(value: float) -> float:
    """Shares up to 1 as percent."""
    return 100 * value if value <= 1 else value
