"""ResNet-18 and MobileNetV2 on the model of Eyeriss: layer by layer, ResNet-18's default space, whole networks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise

import torch
from common import console, save, verdict
from rich.progress import Progress
from rich.table import Table

import haloc
from haloc.cost.asic import AsicCost, asic_costs
from haloc.cost.eyeriss import EYERISS, Eyeriss
from haloc.shapes import Shape, as_deployed

IMAGE = torch.zeros(1, 3, 224, 224)
JOBS = 2
MINUTES_BAR = 10

#: The share of the MACs that remains, where the ratio of the latencies is to lie, and the paper's (its Table 3).
BARS = {"resnet18": ((0.34, 0.36), (2.0, 2.6), 2.03), "mobilenet_v2": ((0.72, 0.74), (1.05, 1.3), 1.19)}

#: 20 bits are the published chip's bus: 64 bits at 60 MHz against 200 MHz.
BANDWIDTHS = (20, 64, 128, 256, 1024)

#: Convolutions of AlexNet and VGG-16 as (in, out, kernel, input, stride, padding, groups), and the images per second
#: that the chip was measured with on them, in batches of 4 and 3 images.
ALEXNET = [
    (3, 96, 11, 227, 4, 0, 1),
    (96, 256, 5, 27, 1, 2, 2),
    (256, 384, 3, 13, 1, 1, 1),
    (384, 384, 3, 13, 1, 1, 2),
    (384, 256, 3, 13, 1, 1, 2),
]
VGG16 = [
    (i, o, 3, n, 1, 1, 1)
    for n, widths in {224: (3, 64, 64), 112: (64, 128, 128), 56: (128, 256, 256, 256)}.items()
    for i, o in pairwise(widths)
] + [(i, o, 3, n, 1, 1, 1) for n, first in ((28, 256), (14, 512)) for i, o in pairwise((first, 512, 512, 512))]
MEASURED = {"AlexNet": (35.0, ALEXNET), "VGG-16": (0.7, VGG16)}

Row = tuple[Shape, haloc.Form]
DENSE = haloc.Dense()


def default_space(layers: haloc.Inventory) -> list[Row]:
    """Every distinct layer of a network in every form that is on offer, dense first."""
    return list(haloc.rank_space(layers).rows())


def dense_rows(layers: haloc.Inventory) -> list[Row]:
    return [(as_deployed(call), DENSE) for layer in layers for call in layer.calls]


def plan_rows(layers: haloc.Inventory, plan: haloc.Plan) -> list[Row]:
    forms = {layer.name: plan.get(layer.name, DENSE) for layer in layers}
    return [(as_deployed(call), forms[layer.name]) for layer in layers for call in layer.calls]


def uniform_plans(layers: dict[str, haloc.Inventory]) -> dict[str, haloc.Plan]:
    """Tucker-2 for ResNet-18's 3×3 layers, SVD for MobileNetV2's 1×1 layers; first and last layer stay dense."""
    resnet = haloc.uniform_plan(layers["resnet18"], macs=0.351, forms=("tucker2",), round_to=4, skip=("conv1", "fc"))
    mobilenet = haloc.uniform_plan(
        layers["mobilenet_v2"], macs=0.73, forms=("svd",), skip=("features.0.0", "classifier.1")
    )
    return {"resnet18": resnet, "mobilenet_v2": mobilenet}


def priced(rows: Sequence[Row], what: str, hardware: Eyeriss = EYERISS) -> dict[Row, AsicCost]:
    distinct = list(dict.fromkeys(rows))
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(what, total=len(distinct))
        costs = asic_costs(distinct, hardware, jobs=JOBS, on_row=lambda _, __: progress.advance(task))
    return dict(zip(distinct, costs, strict=True))


def total(rows: Sequence[Row], costs: dict[Row, AsicCost]) -> dict[str, float]:
    found = [costs[row] for row in rows]
    names = ("latency_ms", "energy_mj", "dram_mb", "bound_ms")
    return {name: sum(getattr(cost, name) for cost in found) for name in names}


def ratios(layers: haloc.Inventory, plan: haloc.Plan, costs: dict[Row, AsicCost]) -> dict[str, float]:
    """How much less the whole network takes under the plan."""
    before, after = total(dense_rows(layers), costs), total(plan_rows(layers, plan), costs)
    ratio = {name.split("_")[0]: before[name] / after[name] for name in before}
    return {"macs": layers.macs_of(plan) / layers.macs, "dense_ms": before["latency_ms"], **ratio}


def forms_of(rows: Sequence[Row]) -> dict[Shape, list[haloc.Form]]:
    forms: dict[Shape, dict[haloc.Form, None]] = {}
    for shape, form in rows:
        forms.setdefault(shape, {}).setdefault(form)
    return {shape: list(offer) for shape, offer in forms.items()}


def fastest_forms(rows: Sequence[Row], costs: dict[Row, AsicCost]) -> dict[str, int]:
    """Of the layers with more than one form: what a search finds that takes the fastest, never slower than dense."""
    offers = {shape: offer for shape, offer in forms_of(rows).items() if len(offer) > 1}
    fastest = {shape: min(offer, key=lambda form: costs[shape, form].cycles) for shape, offer in offers.items()}
    slower = [shape for shape, form in fastest.items() if costs[shape, form].cycles > costs[shape, DENSE].cycles]
    dense = [shape for shape, form in fastest.items() if form == DENSE]
    rejected = [row for row in set(rows) if costs[row].cycles > costs[row[0], DENSE].cycles]
    return {
        "layers": len(fastest),
        "dense": len(dense),
        "slower": len(slower),
        "forms_slower_than_dense": len(rejected),
    }


def staircase(rows: Sequence[Row], costs: dict[Row, AsicCost]) -> dict[str, int]:
    """How often a rank is priced more than 3% above the next larger one of the same layer."""
    steps = [
        (costs[shape, small].cycles, costs[shape, large].cycles)
        for shape, offer in forms_of(rows).items()
        for small, large in pairwise(offer)
        if type(small) is type(large)
    ]
    return {"steps": len(steps), "upside_down": sum(small > 1.03 * large for small, large in steps)}


def chip_check() -> dict[str, dict[str, float]]:
    """The model with the chip's own bus against what the chip was measured with; one image at a time, not a batch."""
    found = {}
    for name, (measured, layers) in MEASURED.items():
        rows = [
            (haloc.ConvShape(i, o, (k, k), (n, n), (s, s), (p, p), (1, 1), groups=g), DENSE)
            for i, o, k, n, s, p, g in layers
        ]
        costs = priced(rows, name, Eyeriss(dram_bits_per_cycle=BANDWIDTHS[0]))
        found[name] = {"modelled_fps": 1e3 / total(rows, costs)["latency_ms"], "measured_fps": measured}
    return found


def layer_table(name: str, layers: haloc.Inventory, costs: dict[Row, AsicCost]) -> Table:
    table = Table(title=f"{name}, every layer dense")
    for column in ("layer", "MMACs", "ms", "at least ms", "mJ", "DRAM MB"):
        table.add_column(column, justify="left" if column == "layer" else "right")
    for layer in layers:
        cost = total([(as_deployed(call), DENSE) for call in layer.calls], costs)
        figures = (layer.macs / 1e6, cost["latency_ms"], cost["bound_ms"], cost["energy_mj"], cost["dram_mb"])
        table.add_row(layer.name, *(f"{figure:.3f}" for figure in figures))
    return table


def space_table(rows: Sequence[Row], costs: dict[Row, AsicCost]) -> Table:
    table = Table(title="ResNet-18's default space")
    for column in ("layer", "form", "ms", "of dense", "mJ"):
        table.add_column(column, justify="left" if column in ("layer", "form") else "right")
    for shape, form in rows:
        cost, dense = costs[shape, form], costs[shape, DENSE]
        part = f"{cost.cycles / dense.cycles:.2f}"
        name = (
            f"{'×'.join(map(str, shape.kernel))} {shape.in_channels}→{shape.out_channels}, {shape.input_size[0]}"
            if isinstance(shape, haloc.ConvShape)
            else f"{shape.in_features}→{shape.out_features}"
        )
        table.add_row(name, str(form), f"{cost.latency_ms:.3f}", part, f"{cost.energy_mj:.3f}")
    return table


def summary(results: dict) -> Table:
    table = Table(title=f"Eyeriss ({results['engine']})")
    for column in ("what", "measured", "bar", ""):
        table.add_column(column)
    for name, (share, bar, paper) in BARS.items():
        found = results["networks"][name]
        held = bar[0] <= found["latency"] <= bar[1] and share[0] <= found["macs"] <= share[1]
        text = f"{bar[0]} to {bar[1]} (paper {paper})"
        table.add_row(
            f"{name} at {found['macs']:.1%} of the MACs, faster", f"{found['latency']:.2f}×", text, verdict(held)
        )
        table.add_row("… less energy", f"{found['energy']:.2f}×", "", "")
    fastest, stairs, seconds = results["fastest"], results["staircase"], results["seconds"]
    text = f"{results['rows']} rows on {JOBS} cores"
    table.add_row(text, f"{seconds / 60:.1f} min", f"≤ {MINUTES_BAR} min", verdict(seconds <= 60 * MINUTES_BAR))
    text = f"dense in {fastest['dense']} of {fastest['layers']} layers"
    table.add_row("fastest form", text, "never slower than dense", verdict(not fastest["slower"]))
    text = f"{stairs['upside_down']} of {stairs['steps']}"
    table.add_row("ranks priced > 3% above the next larger one", text, "", "")
    return table


def settings_table(results: dict) -> Table:
    table = Table(title="What the memory bus does to the ratios")
    for column in ("bits per cycle", *BARS):
        table.add_column(column, justify="right")
    for bits, found in results["bandwidths"].items():
        table.add_row(bits, *(f"{found[name]['latency']:.2f}×" for name in BARS))
    return table


def main() -> None:
    layers = {name: haloc.inspect(haloc.create(name), IMAGE) for name in BARS}
    space = default_space(layers["resnet18"])
    table_rows = [row for name in BARS for row in dense_rows(layers[name])] + space
    start = time.perf_counter()
    costs = priced(table_rows, "table")
    seconds = time.perf_counter() - start

    plans = uniform_plans(layers)
    planned = [row for name in BARS for row in plan_rows(layers[name], plans[name])]
    bandwidths = {}
    for bits in BANDWIDTHS:
        both = [row for name in BARS for row in dense_rows(layers[name])] + planned
        at = priced(both, f"{bits} bits per cycle", Eyeriss(dram_bits_per_cycle=bits))
        bandwidths[str(bits)] = {name: ratios(layers[name], plans[name], at) for name in BARS}
        if bits == EYERISS.dram_bits_per_cycle:
            costs |= at
    results = {
        "engine": f"zigzag-dse {version('zigzag-dse')}",
        "hardware": EYERISS.digest,
        "rows": len(set(table_rows)),
        "seconds": seconds,
        "networks": {name: ratios(layers[name], plans[name], costs) for name in BARS},
        "fastest": fastest_forms([*table_rows, *planned], costs),
        "staircase": staircase(space, costs),
        "bandwidths": bandwidths,
        "chip": chip_check(),
        "dense": {name: total(dense_rows(layers[name]), costs) for name in BARS},
    }
    save(__file__, results)
    for name in BARS:
        console.print(layer_table(name, layers[name], costs))
    console.print(space_table(space, costs), settings_table(results), summary(results))
    console.print("images per second against the chip:", results["chip"])


if __name__ == "__main__":
    main()
