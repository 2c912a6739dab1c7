"""``haloc evaluate``: how good a network is on a data set, dense or factorised by a plan."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from haloc.cli.options import (
    CalibrateOption,
    DataOption,
    DeviceOption,
    JsonOption,
    MeanOption,
    ModelArgument,
    RootOption,
    StdOption,
    WeightsOption,
    base_of,
    kind_of,
    make_model,
    normalisation,
    usable_device,
)
from haloc.cli.output import Tracked, count, note, print_json, print_table, progress
from haloc.cli.prepare import factorised, load_splits, read_plan, training_batches
from haloc.errors import SpecError, nearest

if TYPE_CHECKING:
    from torch import nn

    from haloc.plan import Plan
    from haloc.zoo.batches import Batches
    from haloc.zoo.data import ImageSource, Splits
    from haloc.zoo.images import Normalisation

SPLITS = ("train", "val", "test")

SplitOption = Annotated[str, typer.Option(help="train, val (held out of train) or test.")]
PlanOption = Annotated[Path | None, typer.Option(help="Factorise by this plan.json first.", show_default=False)]
FactorsOption = Annotated[
    Path | None,
    typer.Option(
        help="With a plan: weights of the factorised network, as `haloc finetune` writes them; nothing is decomposed.",
        show_default=False,
    ),
]
FromOption = Annotated[
    Path | None,
    typer.Option("--from", help="Another network: a folder that `haloc apply` saved, or an .onnx or .pt2 file.",
                 show_default=False),
]  # fmt: skip
TrustOption = Annotated[
    bool, typer.Option("--trust", help="With a .pt2: open it, though it can run any code; for files of your own.")
]
RecalibrateOption = Annotated[
    int, typer.Option(min=0, help="Measure BatchNorm statistics anew on so many augmented training images.")
]
BatchOption = Annotated[int, typer.Option(min=1, help="Images at a time.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Only the first so many images.", show_default=False)]


def run(
    model: ModelArgument,
    weights: WeightsOption = None,
    data: DataOption = "cifar10",
    data_root: RootOption = None,
    split: SplitOption = "test",
    plan: PlanOption = None,
    factors: FactorsOption = None,
    source: FromOption = None,
    trust: TrustOption = False,
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

    - `haloc evaluate resnet20 --plan plan.json --factors factors.safetensors`

    - `haloc evaluate resnet20 --from small.onnx`
    """
    if split not in SPLITS:
        raise SpecError(f"there is no split {split!r}, expected one of {', '.join(SPLITS)}.{nearest(split, SPLITS)}")
    if factors is not None and plan is None:
        raise SpecError("--factors are the weights of a network factorised by a plan; give that plan too, with --plan")
    if source is not None:
        _check_source(source, recalibrate, device, {"--plan": plan, "--weights": weights}, trust)
    if plan is None or factors is not None:
        calibrate = 0
    place = usable_device(device)
    splits, scale = load_splits(model, data, data_root, normalisation(mean, std))
    network = make_model(model, weights, len(splits.test.classes)).to(place)
    chosen_plan = None if plan is None else read_plan(network, plan)
    before = _dense_params(model, network, len(splits.test.classes))
    if source is not None:
        network = _opened(source, network, trust)
    elif chosen_plan is not None and factors is not None:
        network = _restored(network, chosen_plan, factors)
    elif chosen_plan is not None:
        network = factorised(network, chosen_plan, splits.train, scale, calibrate, batch_size, responses=True)
    if recalibrate:
        _recalibrated(network, splits, scale, recalibrate, batch_size)
    images: ImageSource = getattr(splits, split)
    batches = images.batches(batch_size, normalisation=scale, limit=limit)
    result: dict[str, Any] = {"model": model, "data": data, "split": split, "plan": str(plan) if plan else None}
    result |= {"from": str(source) if source else None}
    result |= {"factors": str(factors) if factors else None, "calibrated": calibrate, "recalibrated": recalibrate}
    result |= {"params_dense": before}
    result |= _measured(network, batches, min(len(images), limit or len(images)))
    if json:
        print_json(result)
    else:
        print_table(_table(result))


def _check_source(source: Path, recalibrate: int, device: str, others: dict[str, Path | None], trust: bool) -> None:
    """Refuses what cannot be done with a network that is there already."""
    given = next((option for option, value in others.items() if value is not None), None)
    if given is not None:
        raise SpecError(f"--from is a whole network, weights and all; leave {given} out, or --from")
    if source.is_dir():
        return
    if recalibrate or device != "cpu":
        raise SpecError(f"{source} is evaluated on the CPU as it is; leave --recalibrate and --device out")
    if source.suffix.lower() == ".pt2" and source.exists():  # one that is not there is told as such
        from haloc.artifact.runtime import check_trust

        check_trust(source, trust)


def _opened(source: Path, base: nn.Module, trust: bool) -> nn.Module:
    """A saved network, or an exported file."""
    from haloc.artifact.runtime import FORMATS, open_exported
    from haloc.artifact.store import load

    if source.suffix.lower() in FORMATS and not source.is_dir():
        return open_exported(source, trust=trust)
    return load(source, base)


def _dense_params(model: str, network: nn.Module, classes: int) -> int:
    """Parameters of the network that was given, or of what it was made from if it is a compressed one of the zoo."""
    base = base_of(model)
    dense = network if base is None else make_model(base, None, classes)
    return sum(parameter.numel() for parameter in dense.parameters())


def _restored(network: nn.Module, plan: Plan, factors: Path) -> nn.Module:
    from haloc.zoo.factorised import restore

    return restore(network, plan, factors)


def _recalibrated(network: nn.Module, splits: Splits, scale: Normalisation, images: int, batch_size: int) -> None:
    from haloc.recovery import recalibrate

    with progress("recalibrating BatchNorm on training images", images) as advance:
        norms = recalibrate(network, Tracked(training_batches(splits.train, scale, images, batch_size), advance))
    note(f"recalibrated {norms} BatchNorms")


def _measured(network: nn.Module, batches: Batches, total: int) -> dict[str, Any]:
    from haloc.training.evaluate import evaluate

    with progress("evaluating", total) as advance:
        start = time.perf_counter()
        accuracy = evaluate(network, batches, on_batch=advance)
    params = sum(parameter.numel() for parameter in network.parameters()) or None  # a file does not tell
    return asdict(accuracy) | {"params": params, "seconds": time.perf_counter() - start}


def _table(result: dict[str, Any]) -> Table:
    what = kind_of(result["model"]) if result["plan"] is None else f"by {result['plan']}"
    what = f"from {result['from']}" if result["from"] else what
    what += f", weights {result['factors']}" if result["factors"] else ""
    table = Table(title=f"{result['model']} ({what}) on {result['data']}, {result['split']}")
    for column in ("top-1", "top-5", "loss", "images", "params", "of dense", "seconds"):
        table.add_column(column, justify="right")
    table.add_row(
        f"{result['top1']:.2%}",
        f"{result['top5']:.2%}",
        f"{result['loss']:.4f}",
        f"{result['count']:,}",
        "" if result["params"] is None else count(result["params"]),
        "" if result["params"] is None else f"{result['params'] / result['params_dense']:.1%}",
        f"{result['seconds']:.1f}",
    )
    return table
