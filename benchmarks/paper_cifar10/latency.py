"""Times networks under a budget of latency against those under a budget of multiply-adds, taking turns, on a GPU.

    haloc compress benchmarks/paper_cifar10/resnet20-latency-b128.toml --output runs/latency/resnet20-b128
    … and the three others, then
    python benchmarks/paper_cifar10/latency.py runs/latency --output benchmarks/paper_cifar10/results/latency.json

A run that is missing, since nothing on offer was faster than dense, leaves the dense network in its place.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import haloc
from haloc.cost.machine import environment
from haloc.cost.network import time_networks
from haloc.files import read_json, write_json
from haloc.zoo import create

HERE = Path(__file__).resolve().parent
MODELS = {"resnet20": "resnet20", "vgg16": "vgg16_bn_cifar"}


def score(folder: Path, key: str) -> float | None:
    """Top-1 of a run before or after."""
    path = folder / "report.json"
    rows = read_json(path)["figures"] if path.exists() else []
    return next((row[key] / 100 for row in rows if row["key"] == "score"), None)


def known(network: str, *, after: bool) -> float | None:
    """Top-1 of the three-seed runs, or of the network that they began with."""
    path = HERE / "results" / f"{network}.json"
    if not path.exists():
        return None
    figure = read_json(path)["rows"][0]["figures"]["score"]
    return figure["after" if after else "before"] / 100


def rows_of(network: str, batch: int, runs: Path) -> list[dict]:
    """The three networks on one target."""
    folder, target = runs / f"{network}-b{batch}", haloc.Target.parse(f"cuda:graph:fp16:b{batch}:nhwc")
    model, example = create(MODELS[network]), torch.zeros(1, 3, 32, 32)
    layers = haloc.inspect(model, example)
    if not folder.exists():
        raise SystemExit(f"there is no {folder}; run its recipe first")
    mine = folder / "plan.json"
    plans = {
        "dense": haloc.Plan({}),
        "macs": haloc.Plan.load(HERE / "plans" / f"{network}-haloc.json"),
        "latency": haloc.Plan.load(mine) if mine.exists() else haloc.Plan({}),
    }
    distinct = {name: plan for name, plan in plans.items() if plan.changes() or name == "dense"}
    times = dict(zip(distinct, time_networks(model, example, distinct, target).timings, strict=True))
    dense = known(network, after=False)
    scores = {
        "dense": dense,
        "macs": known(network, after=True),
        "latency": score(folder, "after") if mine.exists() else dense,
    }
    return [
        {
            "network": network,
            "target": str(target),
            "plan": name,
            "latency_ms": times.get(name, times["dense"]).latency_ms,
            "error_ms": times.get(name, times["dense"]).iqr_ms / 2,
            "top1": scores[name],
            "macs": layers.macs_of(plan) / layers.macs,
            "params": layers.params_of(plan) / layers.params,
            "changed": len(plan.changes()),
        }
        for name, plan in plans.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "latency.json")
    options = parser.parse_args()
    rows = [row for network in MODELS for batch in (128, 1) for row in rows_of(network, batch, options.runs)]
    target = haloc.Target.parse("cuda:graph:fp16:b128:nhwc")
    write_json(options.output, {"environment": environment(target.to_dict()), "rows": rows})
    for row in rows:
        print(f"{row['network']:9s} {row['target']:28s} {row['plan']:8s} {row['latency_ms']:.4f} ms {row['top1']}")


if __name__ == "__main__":
    main()
