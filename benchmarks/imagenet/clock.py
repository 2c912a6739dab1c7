"""Times saved networks beside the dense one they were made from, predicts them, and keeps both.

    python benchmarks/imagenet/clock.py resnet18 benchmarks/tiny_imagenet/plans/resnet18-half.narrowed.json \
        --classes 200 --targets cpu:onnxruntime:b1 cpu:openvino:b1 --output benchmarks/imagenet/speed/narrowed-cpu.json

What is timed is a folder that `haloc compress` left, or a file of what was narrowed; weights are random. Networks take
turns. A prediction knows the rows of all layers, and whole networks in which only some of the changes are made, never
all of them. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import hypot
from pathlib import Path
from statistics import median

import numpy as np
import torch
from kept import REPEATS, Row, keep, on_each
from torch import nn

import haloc
from haloc.artifact.store import read_card
from haloc.cost.network import fitted_times, left_out_error
from haloc.cost.plans import plan_rows, some_of
from haloc.factor.layers import Layer
from haloc.factor.surgery import skeleton
from haloc.files import read_json
from haloc.narrowing import Narrowed, resized
from haloc.narrowing.hidden import narrowed_from

#: Whole networks that are timed for one prediction, the dense one among them.
NETWORKS = {"cpu": 9, "cuda": 7}

#: What was done to a network: a group of channels narrowed, or a layer written in a form.
Change = Narrowed | tuple[str, haloc.Form]
Pair = dict[str, list[float]]


def changes_of(place: Path) -> tuple[Change, ...]:
    """What makes the saved network out of the dense one."""
    if place.is_file():
        return narrowed_from(read_json(place)["narrowed"])
    folder = place / "model" if (place / "model").is_dir() else place
    plan = haloc.Plan.load(folder / "plan.json")
    return (*narrowed_from(read_card(folder)["narrowed"]), *plan.changes().items())


def made(dense: nn.Module, changes: Iterable[Change]) -> nn.Module:
    """The dense network with these changes, with random weights."""
    changes = tuple(changes)
    plan = haloc.Plan(dict(each for each in changes if not isinstance(each, Narrowed)))
    network = skeleton(resized(dense, [each for each in changes if isinstance(each, Narrowed)]), plan)
    for module in network.modules():  # a skeleton's new layers have weights of zero, which might be fast
        if isinstance(module, Layer) and not bool(module.weight.any()):
            nn.init.kaiming_normal_(module.weight)
    return network.eval()


def between(dense: nn.Module, changes: Sequence[Change], count: int) -> list[nn.Module]:
    """The dense network and, up to ``count`` in all, networks with some of the changes, from few to all but one."""
    return [dense, *(made(dense, some) for some in some_of(changes, count - 1))]


class Sums:
    """What the layers of networks add up to on a target; all rows are measured, equal ones once."""

    def __init__(self, networks: Iterable[nn.Module], example: torch.Tensor, target: haloc.Target) -> None:
        self._layers = {network: haloc.inspect(network, example) for network in networks}
        rows = dict.fromkeys(row for layers in self._layers.values() for row in plan_rows(layers, []))
        self._table = haloc.measure(list(rows), target)

    def of(self, network: nn.Module) -> haloc.Estimate:
        return haloc.layers_cost(self._layers[network], {}, self._table)

    def features(self, network: nn.Module) -> list[float]:
        """As `NetworkCost` has them: one, the sum, and how many layers run one after the other."""
        return [1.0, self.of(network).value, sum(len(layer.calls) for layer in self._layers[network])]

    def corrected(self, network: nn.Module, slopes: np.ndarray, error: float) -> list[float]:
        """What the whole network takes, and how far off that may be."""
        value = float(self.features(network) @ slopes)
        return rounded(value, hypot(error * value, self.of(network).error))


def predicted(
    dense: nn.Module, saved: Mapping[str, Sequence[Change]], example: torch.Tensor, target: haloc.Target, count: int
) -> dict[str, Pair]:
    """What each of the saved networks takes beside the dense one, by networks between the two."""
    known = {name: between(dense, changes, count) for name, changes in saved.items()}
    final = {name: made(dense, changes) for name, changes in saved.items()}
    labels = {network: f"{name} {number}" for name, some in known.items() for number, network in enumerate(some)}
    sums = Sums([*labels, *final.values()], example, target)
    times = haloc.time_models({label: network for network, label in labels.items()}, example, target)

    def pair(name: str) -> Pair:
        features = np.array([sums.features(network) for network in known[name]])
        clock = np.array([times[labels[network]].value for network in known[name]])
        how = fitted_times(features, clock), left_out_error(features, clock)
        return {"dense": sums.corrected(dense, *how), "plan": sums.corrected(final[name], *how)}

    return {name: pair(name) for name in saved}


def timed(
    dense: nn.Module, saved: Mapping[str, Sequence[Change]], example: torch.Tensor, target: haloc.Target, repeats: int
) -> dict[str, Pair]:
    """What the clock says of each of them and of the dense network, all of them taking turns."""
    networks = {"dense": dense, **{name: made(dense, changes) for name, changes in saved.items()}}
    turns = [haloc.time_models(networks, example, target) for _ in range(repeats)]
    middle = {name: rounded(median(turn[name].value for turn in turns)) for name in networks}
    return {name: {"dense": middle["dense"], "plan": middle[name]} for name in saved}


def modelled(
    dense: nn.Module, saved: Mapping[str, Sequence[Change]], example: torch.Tensor, target: haloc.Target
) -> dict[str, Pair]:
    """What the model of a chip says."""
    final = {name: made(dense, changes) for name, changes in saved.items()}
    sums = Sums([dense, *final.values()], example, target)
    return {
        name: {"dense": rounded(sums.of(dense).value), "plan": rounded(sums.of(network).value)}
        for name, network in final.items()
    }


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
    told = predicted(dense, saved, example, where, options.networks or NETWORKS[where.device])
    clock = timed(dense, saved, example, where, options.repeats or REPEATS[where.device])
    for name in saved:
        yield {**of, "plan": name, "latency_ms": told[name], "measured_ms": clock[name]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network")
    parser.add_argument("places", nargs="+", type=Path)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--targets", nargs="+", required=True)
    parser.add_argument("--networks", type=int, help="whole networks timed for a prediction; as a rule 9, on a GPU 7")
    parser.add_argument("--repeats", type=int, help="how often networks are timed; as a rule 5 times, on a GPU once")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    dense = haloc.create(options.network, num_classes=options.classes).eval()
    saved = {place.name.removesuffix(".narrowed.json"): changes_of(place) for place in options.places}

    def work(target: str) -> None:
        rows = list(rows_of(dense, saved, target, options))
        keep(options.output, rows)
        for row in rows:
            print(row, flush=True)

    on_each(options.targets, work)


if __name__ == "__main__":
    main()
