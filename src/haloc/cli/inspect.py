"""``haloc inspect``: what a network is made of and what can be factorised."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from haloc.cli.options import JsonOption, ModelArgument, WeightsOption, example_inputs, make_model
from haloc.cli.output import count, note, print_json, print_table
from haloc.shapes import ConvShape

if TYPE_CHECKING:
    from haloc.inventory import Inventory, LayerInfo

InputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        help="What the model is run on, batch first: 1x3x224x224, or name=1x128:int64 for a named one; "
        "repeat it for several. Models of the zoo know theirs.",
        show_default=False,
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", help="Also write layers.json there.", show_default=False)
]


def run(
    model: ModelArgument,
    weights: WeightsOption = None,
    inputs: InputOption = None,
    output: OutputOption = None,
    json: JsonOption = False,
) -> None:
    """List every convolution and linear layer: shape, cost, the forms open to it, or why it is left alone.

    Examples:
    - `haloc inspect resnet18`

    - `haloc inspect mypackage.models:make_model --input 1x3x320x320 --output layers.json`
    """
    from haloc.factor.inspect import inspect

    layers = inspect(make_model(model, weights), example_inputs(model, inputs or []))
    if output is not None:
        layers.save(output)
        note(f"wrote {output}")
    if json:
        print_json(layers.to_dict())
    else:
        print_table(_table(model, layers))


def _table(model: str, layers: Inventory) -> Table:
    share = f"{layers.open_share:.0%} of the MACs"
    table = Table(title=f"{model}: {len(layers.open_layers)} of {len(layers)} layers can be factorised, {share}")
    for column in ("layer", "kind", "in→out", "kernel", "output"):
        table.add_column(column, overflow="fold")
    for column in ("calls", "MACs", "share", "params"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("forms, or why not", overflow="fold")
    for layer in layers:
        table.add_row(*_row(layer, layers.macs))
    rest_macs = layers.macs - sum(layer.macs for layer in layers)
    rest_params = layers.params - sum(layer.params for layer in layers)
    if rest_macs or rest_params:
        cost = (count(rest_macs), _share(rest_macs, layers.macs), count(rest_params))
        table.add_row("everything else", "", "", "", "", "", *cost, "")
    table.add_section()
    table.add_row("total", "", "", "", "", "", count(layers.macs), "100%", count(layers.params), "")
    return table


def _row(layer: LayerInfo, total: int) -> tuple[str, ...]:
    verdict = ", ".join(layer.families) if layer.families else f"left alone: {layer.reason}"
    return (
        layer.name or "(the model)",
        layer.kind,
        *_shape_cells(layer),
        str(len(layer.calls)) if layer.calls else "",
        count(layer.macs),
        _share(layer.macs, total),
        count(layer.params),
        verdict,
    )


def _shape_cells(layer: LayerInfo) -> tuple[str, str, str]:
    if not layer.calls:
        return ("", "", "")
    shape = layer.shape
    if not isinstance(shape, ConvShape):
        return (f"{shape.in_features}→{shape.out_features}", "", str(shape.positions))
    extras = [f"/{shape.stride[0]}"] if max(shape.stride) > 1 else []
    extras += [f"dil {max(shape.dilation)}"] if max(shape.dilation) > 1 else []
    extras += [f"g{shape.groups}"] if shape.groups > 1 else []
    kernel = " ".join(["×".join(map(str, shape.kernel)), *extras])
    return (f"{shape.in_channels}→{shape.out_channels}", kernel, "×".join(map(str, shape.output_size)))


def _share(part: int, total: int) -> str:
    return f"{part / max(1, total):.1%}"
