"""``haloc export``: a network as one file for deployment, compared with the model, timed and quantised if asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from haloc.cli.apply import warn_of_random
from haloc.cli.inspect import InputOption
from haloc.cli.options import (
    JsonOption,
    MeanOption,
    ModelArgument,
    RootOption,
    StdOption,
    WeightsOption,
    example_inputs,
    kind_of,
    make_model,
    normalisation,
)
from haloc.cli.output import counting, note, print_json, print_table, progress
from haloc.cli.prepare import load_splits
from haloc.errors import FileFormatError, SpecError, shown

if TYPE_CHECKING:
    from torch import nn

    from haloc.cost.target import Target
    from haloc.zoo.data import Splits
    from haloc.zoo.images import Normalisation

#: Images at a time while comparing, calibrating and evaluating.
_AT_A_TIME = 64

FromOption = Annotated[
    Path | None,
    typer.Option("--from", help="A saved network (a folder); without it the dense model is exported.",
                 show_default=False),
]  # fmt: skip
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="The .onnx or .pt2 file.", show_default=False)]
SomeDataOption = Annotated[
    str | None,
    typer.Option(help="cifar10, digits, tiny-imagenet or imagefolder: compare on real images, tell the accuracy.",
                 show_default=False),
]  # fmt: skip
LimitOption = Annotated[
    int | None, typer.Option(min=1, help="Evaluate on the first so many test images only.", show_default=False)
]
Int8Option = Annotated[
    bool, typer.Option("--int8", help="Also write NAME.int8.onnx with 8-bit weights and activations; needs --data.")
]
SamplesOption = Annotated[int, typer.Option(min=1, help="With --int8: training images to calibrate on.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Examples at a time, where the file takes no other number.")]
FixedOption = Annotated[bool, typer.Option("--fixed-batch", help="Export for batches of --batch-size only.")]
OpsetOption = Annotated[
    int | None, typer.Option(min=9, help="Version of ONNX's operators, if not the exporter's own.", show_default=False)
]
TargetOption = Annotated[
    str | None,
    typer.Option("--target", "-t", help="Time the file there: cpu:onnxruntime:b64, cpu:openvino:b1; cpu for a .pt2.",
                 show_default=False),
]  # fmt: skip


def run(
    model: ModelArgument,
    output: OutputOption,
    source: FromOption = None,
    weights: WeightsOption = None,
    inputs: InputOption = None,
    data: SomeDataOption = None,
    data_root: RootOption = None,
    limit: LimitOption = None,
    int8: Int8Option = False,
    samples: SamplesOption = 512,
    batch_size: BatchOption = 1,
    fixed_batch: FixedOption = False,
    opset: OpsetOption = None,
    target: TargetOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    json: JsonOption = False,
) -> None:
    """Write a network as one .onnx or .pt2 file, after comparing what it computes with the model.

    Examples:
    - `haloc export resnet20 --from small --output small.onnx --target cpu:onnxruntime:b64`

    - `haloc export resnet20 --weights pretrained --data cifar10 --int8 --output resnet20.onnx`
    """
    from haloc.artifact.export import export
    from haloc.artifact.runtime import format_of
    from haloc.artifact.tensors import of_batch

    place = _target(target, output)
    if int8 and (data is None or format_of(output) != "onnx"):
        raise SpecError("--int8 makes .onnx files and looks at training images; give --data and an .onnx --output")
    images = None if data is None else load_splits(model, data, data_root, normalisation(mean, std))
    network = network_from(model, source, weights, None if images is None else len(images[0].test.classes))
    example = of_batch(_example(model, inputs or [], images), batch_size)
    real = None if images is None else images[0].test.batches(_AT_A_TIME, normalisation=images[1])
    note(f"exporting {output}")
    made = export(network, output, example, samples=real, dynamic_batch=not fixed_batch, opset=opset)
    result: dict[str, Any] = {"model": model, "from": None if source is None else str(source)} | made.to_dict()
    files = {"fp32": output}
    if int8 and images is not None:
        files["int8"] = output.with_suffix(".int8.onnx")
        result["int8"] = _quantised(output, files["int8"], images, samples)
    result["top1"] = {} if images is None else {name: _top1(path, images, limit) for name, path in files.items()}
    result["target"] = None if place is None else str(place)
    result["latency_ms"] = {} if place is None else _timed(files, example, place)
    if json:
        print_json(result)
    else:
        print_table(_table(result))


def network_from(model: str, source: Path | None, weights: Path | None, classes: int | None) -> nn.Module:
    """The network saved in a folder, or the dense model with its weights."""
    from haloc.artifact.store import load, read_card

    if source is None:
        warn_of_random(model, weights)
        return make_model(model, weights, classes)
    if weights is not None:
        raise SpecError("--from has the weights of the network in it; leave --weights out, or --from")
    return load(source, make_model(model, None, classes or _classes(read_card(source))))


#: No network tells more classes apart; a saved one that says so would fill the memory with its last layer.
_MOST_CLASSES = 10**6


def _classes(card: dict[str, Any]) -> int | None:
    """How many classes a saved network says it has, if it does."""
    known = card.get("provenance")
    found = known.get("classes") if isinstance(known, dict) else None
    if found is None or (type(found) is int and 0 < found <= _MOST_CLASSES):
        return found
    raise FileFormatError(f"the saved network says that it has {shown(found)} classes, which cannot be")


def _target(text: str | None, output: Path) -> Target | None:
    """Where to time it, known to run such files before anything long begins."""
    if text is None:
        return None
    from haloc.artifact.runtime import check_format
    from haloc.cost.measure import check_available
    from haloc.cost.target import Target

    target = Target.parse(text)
    check_format(output, target)
    check_available(target)
    return target


def _example(model: str, texts: list[str], images: tuple[Splits, Normalisation] | None) -> Any:
    """What the user spelled, else an image of the data, else what the zoo knows of the model."""
    if texts or images is None:
        return example_inputs(model, texts)
    return next(iter(images[0].test.batches(1, normalisation=images[1], limit=1)))[0]


def _quantised(source: Path, path: Path, images: tuple[Splits, Normalisation], samples: int) -> dict[str, Any]:
    from haloc.artifact.quantise import quantise

    splits, scale = images
    note(f"quantising to {path} on {samples} training images")
    batches = splits.train.batches(_AT_A_TIME, normalisation=scale, shuffle=True, limit=samples)
    return quantise(source, path, batches, limit=samples).to_dict()


def _top1(path: Path, images: tuple[Splits, Normalisation], limit: int | None) -> float:
    from haloc.artifact.runtime import open_exported
    from haloc.training.evaluate import evaluate

    splits, scale = images
    with progress(f"evaluating {path}", min(len(splits.test), limit or len(splits.test))) as advance:
        batches = splits.test.batches(_AT_A_TIME, normalisation=scale, limit=limit)
        return evaluate(open_exported(path, trust=True), batches, on_batch=advance).top1


def _timed(files: dict[str, Path], example: Any, target: Target) -> dict[str, list[float]]:
    from haloc.artifact.runtime import time_files

    with counting(f"timing on {target}") as on_progress:
        found = time_files(files, example, target, on_progress=on_progress)
    return {name: [estimate.value, estimate.error] for name, estimate in found.items()}


def _table(result: dict[str, Any]) -> Table:
    what = kind_of(result["model"]) if result["from"] is None else f"from {result['from']}"
    where = f", timed on {result['target']}" if result["target"] else ""
    table = Table(title=f"{result['model']} ({what}){where}")
    table.add_column("file", overflow="fold")
    for column in ("KiB", "batch", "off by (random)", "off by (real)", "same answer", "top-1", "ms"):
        table.add_column(column, justify="right", no_wrap=True)
    batch = "any" if result["dynamic_batch"] else str(next(iter(result["inputs"].values()))[0])
    off = [
        f"{result['parity'][kind]['relative']:.1e}" if kind in result["parity"] else "" for kind in ("random", "real")
    ]
    same = min(parity["same_answer"] for parity in result["parity"].values())
    table.add_row(result["path"], _kib(result), batch, *off, f"{same:.2%}", *_measured(result, "fp32"))
    if "int8" in result:
        made = result["int8"]
        cells = ("", f"{made['parity']['relative']:.1e}", f"{made['parity']['same_answer']:.2%}")
        table.add_row(made["path"], _kib(made), batch, *cells, *_measured(result, "int8"))
    return table


def _kib(file: dict[str, Any]) -> str:
    return f"{file['bytes'] / 1024:,.0f}"


def _measured(result: dict[str, Any], name: str) -> tuple[str, str]:
    """Accuracy and latency, where they were asked for."""
    top1, latency = result["top1"].get(name), result["latency_ms"].get(name)
    shown = "" if latency is None else f"{latency[0]:.3f} ± {latency[1]:.3f}"
    return "" if top1 is None else f"{top1:.2%}", shown
