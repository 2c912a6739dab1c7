"""Times saved networks beside the dense one they were made from, all of them taking turns, and keeps the figures.

    python benchmarks/imagenet/clock.py resnet18 benchmarks/tiny_imagenet/plans/resnet18-half.narrowed.json \
        --classes 200 --targets cpu:onnxruntime:b1 cpu:openvino:b1 --output benchmarks/imagenet/speed/narrowed-cpu.json

What is timed is a folder that `haloc compress` left, or a file of what was narrowed; weights are random. On a CPU the
median of five comparisons counts. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import haloc
from haloc.artifact.store import read_card
from haloc.factor.layers import Layer
from haloc.factor.surgery import skeleton
from haloc.files import read_json, write_json
from haloc.narrowing.hidden import narrowed_from
from haloc.narrowing.surgery import resized
from haloc.shapes import as_deployed

#: How often networks are timed: within minutes a CPU drifts by some percent.
REPEATS = {"cpu": 5, "cuda": 1}


def shaped(dense: nn.Module, place: Path) -> nn.Module:
    """A network of the saved one's shape, with random weights."""
    folder = place / "model" if (place / "model").is_dir() else place
    told = read_json(place) if place.is_file() else read_card(folder)
    plan = haloc.Plan({}) if place.is_file() else haloc.Plan.load(folder / "plan.json")
    network = skeleton(resized(dense, narrowed_from(told["narrowed"])), plan)
    for module in network.modules():  # a skeleton's new layers have weights of zero, which might be fast
        if isinstance(module, Layer) and not bool(module.weight.any()):
            nn.init.kaiming_normal_(module.weight)
    return network.eval()


def modelled(dense: nn.Module, network: nn.Module, example: torch.Tensor, target: haloc.Target) -> dict[str, Any]:
    """What the model of a chip says of both."""
    layers = {"dense": haloc.inspect(dense, example), "plan": haloc.inspect(network, example)}
    shapes = dict.fromkeys(as_deployed(call) for each in layers.values() for layer in each for call in layer.calls)
    table = haloc.measure([(shape, haloc.Dense()) for shape in shapes], target)
    found = {name: [round(haloc.layers_cost(each, {}, table).value, 4)] for name, each in layers.items()}
    return {"size": example.shape[-1], "latency_ms": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network")
    parser.add_argument("places", nargs="+", type=Path)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--targets", nargs="+", required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    dense = haloc.create(options.network, num_classes=options.classes).eval()
    networks = {place.name.removesuffix(".narrowed.json"): shaped(dense, place) for place in options.places}
    known = read_json(options.output)["rows"] if options.output.exists() else []
    example = torch.randn(1, 3, options.size, options.size)
    for target in options.targets:
        where = haloc.Target.parse(target)
        if where.device == "asic":
            for name, network in networks.items():
                told = {"network": options.network, "plan": name, "target": target}
                known.append({**told, **modelled(dense, network, example, where)})
            write_json(options.output, {"rows": known})
            continue
        turns = [haloc.time_models({"dense": dense, **networks}, example, where) for _ in range(REPEATS[where.device])]
        of = {"network": options.network, "size": options.size, "target": target}
        for name in networks:
            best = {key: median(turn[key].value for turn in turns) for key in ("dense", name)}
            pair = {"dense": [round(best["dense"], 4)], "plan": [round(best[name], 4)]}
            known = [row for row in known if (row["plan"], row["target"], row["size"]) != (name, target, options.size)]
            known.append({**of, "plan": name, "measured_ms": pair})
            print(f"{target} {name}: {pair['dense'][0]:.4f} → {pair['plan'][0]:.4f} ms, "
                  f"{pair['dense'][0] / pair['plan'][0]:.2f}×", flush=True)  # fmt: skip
        write_json(options.output, {"rows": known})


if __name__ == "__main__":
    main()
