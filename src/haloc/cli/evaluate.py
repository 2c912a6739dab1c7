"""``haloc evaluate``: how good a network is on a data set, dense or factorised by a plan."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from haloc.cli.options import JsonOption, ModelArgument, WeightsOption, make_model, normalisation, usable_device
from haloc.cli.output import Tracked, count, note, print_json, print_table, progress
from haloc.errors import SpecError, nearest

if TYPE_CHECKING:
    from torch import nn

    from haloc.plan import Plan
    from haloc.zoo.batches import Batches
    from haloc.zoo.data import ImageSource, Splits
    from haloc.zoo.images import Normalisation

SPLITS = ("train", "val", "test")

DataOption = Annotated[str, typer.Option(help="cifar10, digits or imagefolder.")]
RootOption = Annotated[Path | None, typer.Option(help="Folder the data set lies in.", show_default=False)]
SplitOption = Annotated[str, typer.Option(help="train, val (held out of train) or test.")]
PlanOption = Annotated[Path | None, typer.Option(help="Factorise by this plan.json first.", show_default=False)]
CalibrateOption = Annotated[
    int, typer.Option(min=0, help="With a plan: make it activation-aware, from so many training images; 0: don't.")
]
RecalibrateOption = Annotated[
    int, typer.Option(min=0, help="Measure BatchNorm statistics anew on so many augmented training images.")
]
BatchOption = Annotated[int, typer.Option(min=1, help="Images at a time.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Only the first so many images.", show_default=False)]
MeanOption = Annotated[
    str | None,
    typer.Option(help="Normalisation, such as 0.485,0.456,0.406; the zoo's models know their own.", show_default=False),
]
StdOption = Annotated[str | None, typer.Option(help="Normalisation, such as 0.229,0.224,0.225.", show_default=False)]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]


def run(
    model: ModelArgument,
    weights: WeightsOption = None,
    data: DataOption = "cifar10",
    data_root: RootOption = None,
    split: SplitOption = "test",
    plan: PlanOption = None,
    calibrate: CalibrateOption = 1000,
    recalibrate: RecalibrateOption = 0,
    batch_size: BatchOption = 250,
    limit: LimitOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    device: DeviceOption = "cpu",
    json: JsonOption = False,
) -> None:
    """Measure accuracy on a data set, of the network as it is or factorised by a plan.

    Examples:
    - `haloc evaluate resnet20 --weights resnet20.safetensors --data cifar10`

    - `haloc evaluate resnet20 --weights resnet20.safetensors --plan plan.json --recalibrate 2000`
    """
    if split not in SPLITS:
        raise SpecError(f"there is no split {split!r}, expected one of {', '.join(SPLITS)}.{nearest(split, SPLITS)}")
    network = make_model(model, weights).to(usable_device(device))
    splits, scale = _data(model, data, data_root, normalisation(mean, std))
    chosen_plan = _plan(network, plan)
    before = sum(parameter.numel() for parameter in network.parameters())
    if chosen_plan is not None:
        network = _factorised(network, chosen_plan, splits, scale, calibrate, batch_size)
    if recalibrate:
        _recalibrated(network, splits, scale, recalibrate, batch_size)
    images: ImageSource = getattr(splits, split)
    batches = images.batches(batch_size, normalisation=scale, limit=limit)
    result: dict[str, Any] = {"model": model, "data": data, "split": split, "plan": str(plan) if plan else None}
    result |= {"calibrated": calibrate if plan else 0, "recalibrated": recalibrate, "params_dense": before}
    result |= _measured(network, batches, min(len(images), limit or len(images)))
    if json:
        print_json(result)
    else:
        print_table(_table(result))


def _data(model: str, data: str, root: Path | None, given: Normalisation | None) -> tuple[Splits, Normalisation]:
    """The data set, and the normalisation: the user's, else the model's, else the data's."""
    from haloc.zoo.data import load_data
    from haloc.zoo.registry import entry_for

    splits, entry = load_data(data, root=root), entry_for(model)
    return splits, given or (entry.normalisation if entry is not None else splits.normalisation)


def _plan(network: nn.Module, path: Path | None) -> Plan | None:
    """Reads the plan and checks it against the network before anything long begins."""
    if path is None:
        return None
    from haloc.factor.surgery import check_plan
    from haloc.plan import Plan

    plan = Plan.load(path)
    check_plan(network, plan)
    return plan


def _factorised(
    network: nn.Module, plan: Plan, splits: Splits, scale: Normalisation, images: int, batch_size: int
) -> nn.Module:
    from haloc.factor.calibrate import calibrate
    from haloc.factor.surgery import apply_plan

    moments, changes = None, plan.changes()
    if images:
        with progress("calibrating on training images", images) as advance:
            batches = Tracked(_training_batches(splits, scale, images, batch_size), advance)
            moments = calibrate(network, batches, changes)
    with progress("factorising layers", len(changes)) as advance:
        return apply_plan(network, plan, moments=moments, on_layer=lambda _: advance(1))


def _recalibrated(network: nn.Module, splits: Splits, scale: Normalisation, images: int, batch_size: int) -> None:
    from haloc.finetune import recalibrate

    with progress("recalibrating BatchNorm on training images", images) as advance:
        norms = recalibrate(network, Tracked(_training_batches(splits, scale, images, batch_size), advance))
    note(f"recalibrated {norms} BatchNorms")


def _training_batches(splits: Splits, scale: Normalisation, images: int, batch_size: int) -> Batches:
    """Training images as training sees them: shuffled and augmented."""
    return splits.train.batches(batch_size, normalisation=scale, augment=True, shuffle=True, limit=images)


def _measured(network: nn.Module, batches: Batches, total: int) -> dict[str, Any]:
    from haloc.train.evaluate import evaluate

    with progress("evaluating", total) as advance:
        start = time.perf_counter()
        accuracy = evaluate(network, batches, on_batch=advance)
    params = sum(parameter.numel() for parameter in network.parameters())
    return asdict(accuracy) | {"params": params, "seconds": time.perf_counter() - start}


def _table(result: dict[str, Any]) -> Table:
    what = "dense" if result["plan"] is None else f"by {result['plan']}"
    table = Table(title=f"{result['model']} ({what}) on {result['data']}, {result['split']}")
    for column in ("top-1", "top-5", "loss", "images", "params", "of dense", "seconds"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{result['top1']:.2%}",
        f"{result['top5']:.2%}",
        f"{result['loss']:.4f}",
        f"{result['count']:,}",
        count(result["params"]),
        f"{result['params'] / result['params_dense']:.1%}",
        f"{result['seconds']:.1f}",
    )
    return table
