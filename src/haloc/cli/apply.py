"""``haloc apply``: factorises a trained network by a plan and saves it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from haloc.cli.options import (
    DeviceOption,
    JsonOption,
    MeanOption,
    ModelArgument,
    RootOption,
    StdOption,
    WeightsOption,
    make_model,
    normalisation,
    usable_device,
)
from haloc.cli.output import Tracked, count, note, print_json, print_table, progress
from haloc.cli.prepare import factorised, load_splits, read_plan, training_batches
from haloc.errors import FileFormatError, SpecError

if TYPE_CHECKING:
    from torch import nn

    from haloc.plan import Plan
    from haloc.zoo.batches import Batches

#: Training images that are looked at where data are given and no number is.
_CALIBRATE, _RECALIBRATE = 1000, 2000

PlanOption = Annotated[Path, typer.Option(help="The plan to factorise by.", show_default=False)]
OutputOption = Annotated[
    Path, typer.Option("--output", "-o", help="The folder to save the network in.", show_default=False)
]
SomeDataOption = Annotated[
    str | None,
    typer.Option(help="cifar10, digits, tiny-imagenet or imagefolder; without any, only the weights are looked at.",
                 show_default=False),
]  # fmt: skip
CalibrateOption = Annotated[
    int | None,
    typer.Option(min=0, help=f"With data: make it activation-aware, from so many training images.  [{_CALIBRATE}]",
                 show_default=False),
]  # fmt: skip
RecalibrateOption = Annotated[
    int | None,
    typer.Option(min=0, help=f"With data: measure BatchNorm statistics anew on so many images.  [{_RECALIBRATE}]",
                 show_default=False),
]  # fmt: skip
BatchOption = Annotated[int, typer.Option(min=1, help="Images at a time.")]


def run(
    model: ModelArgument,
    plan: PlanOption,
    output: OutputOption,
    weights: WeightsOption = None,
    data: SomeDataOption = None,
    data_root: RootOption = None,
    calibrate: CalibrateOption = None,
    recalibrate: RecalibrateOption = None,
    batch_size: BatchOption = 250,
    mean: MeanOption = None,
    std: StdOption = None,
    device: DeviceOption = "cpu",
    json: JsonOption = False,
) -> None:
    """Factorise a trained network by a plan and save it: weights.safetensors, plan.json and model.json in a folder.

    Examples:
    - `haloc apply resnet20 --weights pretrained --plan plan.json --output small`

    - `haloc apply resnet20 --weights pretrained --plan plan.json --data cifar10 --recalibrate 5000 --output small`
    """
    from haloc.artifact.store import save

    place = usable_device(device)
    check_folder(output)
    warn_of_random(model, weights)
    if data is None:
        _refuse_without_data(calibrate, recalibrate)
        network = make_model(model, weights).to(place)
        chosen, classes = read_plan(network, plan), None
        small, looked = _written(network, chosen), (0, 0)
    else:
        splits, scale = load_splits(model, data, data_root, normalisation(mean, std))
        classes = len(splits.train.classes)
        network = make_model(model, weights, classes).to(place)
        chosen = read_plan(network, plan)
        looked = (_CALIBRATE if calibrate is None else calibrate, _RECALIBRATE if recalibrate is None else recalibrate)
        small = factorised(network, chosen, splits.train, scale, looked[0], batch_size, responses=True)
        if looked[1]:
            _recalibrated(small, training_batches(splits.train, scale, looked[1], batch_size), looked[1])
    result: dict[str, Any] = {"model": model, "weights": None if weights is None else str(weights), "plan": str(plan)}
    result |= {"data": data, "classes": classes, "calibrated": looked[0], "recalibrated": looked[1]}
    save(output, small, provenance={"command": "apply", **result})
    result |= {"layers": len(chosen.changes()), "params_dense": _params(network), "params": _params(small)}
    result |= {"output": str(output)}
    if json:
        print_json(result)
    else:
        print_table(_table(result))


def check_folder(folder: Path) -> None:
    """Refuses to write over weights and plans that are not those of a saved network."""
    from haloc.artifact.store import CARD, PLAN, WEIGHTS

    others = [name for name in (WEIGHTS, PLAN) if (folder / name).exists()]
    if folder.exists() and not folder.is_dir():
        raise FileFormatError(f"{folder} is a file, expected a folder; choose another name")
    if others and not (folder / CARD).exists():
        raise FileFormatError(
            f"{folder} has the {others[0]} of something else, a run say, which would be lost; choose another folder"
        )


def warn_of_random(model: str, weights: Path | None) -> None:
    """Says that a network of the zoo without weights knows nothing."""
    from haloc.zoo.registry import entry_for

    if weights is None and entry_for(model) is not None:
        note(f"warning: {model} without --weights has random ones")


def _refuse_without_data(calibrate: int | None, recalibrate: int | None) -> None:
    for option, value in (("--calibrate", calibrate), ("--recalibrate", recalibrate)):
        if value:
            raise SpecError(f"{option} looks at training images; say which, for example --data cifar10")


def _written(network: nn.Module, plan: Plan) -> nn.Module:
    from haloc.factor.surgery import apply_plan

    with progress("factorising layers", len(plan.changes())) as advance:
        return apply_plan(network, plan, on_layer=lambda _: advance(1))


def _recalibrated(network: nn.Module, batches: Batches, images: int) -> None:
    from haloc.recovery import recalibrate

    with progress("recalibrating BatchNorm on training images", images) as advance:
        recalibrate(network, Tracked(batches, advance))


def _params(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _table(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['model']} by {result['plan']}")
    for column in ("layers factorised", "params", "of dense", "calibrated on", "recalibrated on"):
        table.add_column(column, justify="right")
    table.add_column("saved in", overflow="fold")
    share = f"{result['params'] / max(1, result['params_dense']):.1%}"
    images = [f"{result[name]:,}" if result[name] else "" for name in ("calibrated", "recalibrated")]
    table.add_row(str(result["layers"]), count(result["params"]), share, *images, result["output"])
    return table
