"""``haloc search --pareto``: a plan for each of many budgets, from what one search found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from haloc.cli.chosen import amount
from haloc.cli.costs import cost_named
from haloc.cli.options import make_model, normalisation, usable_device
from haloc.cli.output import counting, note, print_json, print_table
from haloc.cli.prepare import load_splits, training_batches
from haloc.cli.subject import CALIBRATION_BATCH, SearchData, calibrated
from haloc.errors import FileFormatError, SpecError, nearest

if TYPE_CHECKING:
    from torch import nn

    from haloc.factor.calibrate import InputMoments
    from haloc.report.pareto import Point, TradeOff
    from haloc.zoo.batches import Batches
    from haloc.zoo.data import ImageSource, Splits
    from haloc.zoo.images import Normalisation

SPLITS = ("val", "test")
#: Training images on which BatchNorm statistics of every network are measured anew.
RECALIBRATION = 2000


@dataclass(frozen=True)
class Curve:
    """A curve as the user wants it.

    Attributes:
        source: The file of the search.
        tables: What costs are read from.
        over: The name of what the budgets are of, or None for the only one there is.
        points: How many budgets.
        model: The network to evaluate, or None.
        weights: Its weights, or None.
        data: What it is evaluated on.
        split: Which images of that.
        activations: Training images from which factors are found.
    """

    source: Path | None
    tables: Mapping[str, Path]
    over: str | None
    points: int
    model: str | None
    weights: Path | None
    data: SearchData
    split: str
    activations: int


def draw(curve: Curve, folder: Path, device: str, json: bool) -> None:
    """Solves for all budgets, evaluates the networks where there are data, and writes and draws the curve."""
    from haloc.methods.evidence import Evidence
    from haloc.report.pareto import trade_off
    from haloc.report.search_figures import pareto_figure
    from haloc.report.style import require_matplotlib, write_figure

    source = _checked(curve, folder)
    require_matplotlib()
    evidence = Evidence.load(source)
    found = trade_off(evidence, curve.points, cost_named(evidence.space, curve.tables, curve.over))
    if curve.model is not None and curve.data.data is not None:
        found = _evaluated(found, curve, curve.model, curve.data.data, device)
    found.save(folder / "pareto.json")
    figure = pareto_figure({evidence.method: found})
    for suffix in (".png", ".svg"):
        write_figure(figure, folder / f"pareto{suffix}")
    if json:
        print_json(found.to_dict())
    else:
        print_table(_table(found, source))
    note(f"wrote pareto.json, pareto.png and pareto.svg to {folder}")


def _checked(curve: Curve, folder: Path) -> Path:
    """The file of the search, once nothing is wrong with the rest."""
    if curve.source is None:
        raise SpecError("--pareto needs what a search found; say where it is, with --from runs/a/search.json")
    if (curve.model is None) != (curve.data.data is None):
        raise SpecError("to evaluate the networks give both, the model and --data; or neither")
    if curve.split not in SPLITS:
        raise SpecError(
            f"networks are compared on images that are held out: {' or '.join(SPLITS)}, got {curve.split!r}."
            f"{nearest(curve.split, SPLITS)}"
        )
    if folder.exists() and not folder.is_dir():
        raise FileFormatError(f"{folder} is a file, expected a folder for the curve; choose another name")
    return curve.source


def _evaluated(found: TradeOff, curve: Curve, model: str, data: str, device: str) -> TradeOff:
    """Builds every network, activation-aware and with fresh BatchNorm statistics, and measures its accuracy."""
    place, options = usable_device(device), curve.data
    given = normalisation(options.mean, options.std)
    splits, scale = load_splits(model, data, options.data_root, given, options.workers)
    network = make_model(model, curve.weights, len(splits.test.classes)).to(place)
    bench = Bench(network, splits, scale, _held_out(splits, curve.split).on(place), options.batch_size)
    names = sorted({name for point in found.points for name in point.plan.changes()})
    moments = calibrated(network, splits.train, scale, names, curve.activations, responses=True)
    points: list[Point] = []
    with counting(f"evaluating {len(found.points)} networks on {curve.split} images of {data}") as on_progress:
        for number, point in enumerate(found.points):
            on_progress(number, len(found.points))
            points.append(replace(point, top1=bench.top1(point, moments)))
    return replace(found, points=tuple(points), top1=bench.top1(None, None), images=f"{curve.split} images of {data}")


@dataclass(frozen=True, eq=False)
class Bench:
    """Where networks are built and judged.

    Attributes:
        network: The dense network, on its device.
        splits: The data set.
        scale: How it is normalised.
        held: The images to evaluate on.
        batch_size: Images at a time.
    """

    network: nn.Module
    splits: Splits
    scale: Normalisation
    held: ImageSource
    batch_size: int

    def top1(self, point: Point | None, moments: Mapping[str, InputMoments] | None) -> float:
        """The accuracy of a point's network, or of the dense one."""
        from haloc.factor.surgery import apply_plan
        from haloc.recovery import recalibrate
        from haloc.training.evaluate import evaluate

        network = self.network
        if point is not None and point.plan.changes():
            network = apply_plan(network, point.plan, moments=moments)
            recalibrate(network, self._training(RECALIBRATION))
        return evaluate(network, self.held.batches(self.batch_size, normalisation=self.scale)).top1

    def _training(self, images: int) -> Batches:
        return training_batches(self.splits.train, self.scale, images, CALIBRATION_BATCH)


def _held_out(splits: Splits, name: str) -> ImageSource:
    return splits.val if name == "val" else splits.test


def _table(found: TradeOff, source: Path) -> Table:
    table = Table(title=f"{found.quantity} and what they buy, from {source} (method {found.method})")
    for column in ("budget", "costs", "of dense", "saved", "loss", *(["top-1"] if found.top1 is not None else [])):
        table.add_column(column, justify="right", no_wrap=True)
    for point in found.points:
        costs = (amount(point.budget, found.unit), amount(point.cost, found.unit))
        cells = (*costs, f"{point.share:.1%}", f"{1 - point.share:.1%}", f"{point.loss:.4g}")
        table.add_row(*cells, *([] if point.top1 is None else [f"{point.top1:.2%}"]))
    if found.top1 is not None:
        table.add_section()
        table.add_row("dense", amount(found.dense, found.unit), "100.0%", "0.0%", "", f"{found.top1:.2%}")
    return table
