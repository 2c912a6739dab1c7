"""Judges networks on ImageNet's validation images, and keeps the figures.

    python benchmarks/imagenet/judge.py resnet18 weights/resnet18_imagenet.safetensors runs/resnet18-50 runs/resnet18-70

Each run is a folder of `haloc compress … --no-train`. What is known of one already is replaced.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import haloc
from haloc.artifact.store import read_card
from haloc.files import read_json, write_json
from haloc.plan import Plan
from haloc.zoo.folder import FolderImages
from haloc.zoo.images import IMAGENET

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"


def judged(network: Any, images: FolderImages) -> float:
    """Top-1, in percent."""
    return round(100 * haloc.evaluate(network, images.batches(50, normalisation=IMAGENET)).top1, 2)


def row_of(run: Path, name: str, images: FolderImages) -> dict[str, Any]:
    """What one run came to; it is judged here unless it was judged by its own test images."""
    report, stages = read_json(run / "report.json"), read_json(run / "stages.json")["stages"]
    figures = {row["key"]: row for row in report["figures"]}
    counts = {key: round(figures[key]["after"] / figures[key]["before"], 4) for key in ("macs", "params")}
    blocks = read_json(rebuilt)["blocks"] if (rebuilt := run / "reconstruct" / "outcome.json").exists() else []
    score = figures["score"]["after"] if "score" in figures else None
    return {
        "network": name,
        "how": how_of(run, bool(blocks)),
        **counts,
        "top1": judged(haloc.load(run / "model", haloc.create(name)), images) if score is None else round(score, 2),
        "seconds": {stage: round(row["seconds"], 1) for stage, row in stages.items() if row["seconds"] >= 0.05},
        "blocks": {block["block"]: [round(block[key], 4) for key in ("before", "after")] for block in blocks},
    }


def how_of(run: Path, rebuilt: bool) -> str:
    """In a word or two, what was done; reconstruction after ranks goes without saying."""
    if Plan.load(run / "plan.json").changes():
        return "narrowing, ranks" if (run / "narrowed").exists() else "ranks"
    return "narrowing, reconstruction" if rebuilt else "narrowing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=("resnet18", "mobilenet_v2"))
    parser.add_argument("weights", type=Path)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--images", type=Path, default=Path("data/imagenet-val"))
    options = parser.parse_args()
    images = FolderImages.numbered(options.images, size=224, workers=2)
    known = read_json(RESULTS) if RESULTS.is_file() else {"images": len(images), "dense": {}, "rows": {}}
    if options.network not in known["dense"]:
        known["dense"][options.network] = judged(haloc.create(options.network, weights=options.weights), images)
        write_json(RESULTS, known)
    for run in options.runs:
        row = row_of(run, options.network, images)
        kind = "narrow-" if row["how"].startswith("narrowing") else ""
        name = f"{options.network}-{kind}{100 * row['macs']:.0f}"
        known["rows"][name] = row
        if kind:
            card = read_card(run / "model")
            write_json(HERE / "plans" / f"{name}.narrowed.json", {"narrowed": card["narrowed"]})
        else:
            Plan.load(run / "plan.json").save(HERE / "plans" / f"{name}.json")
        write_json(RESULTS, known)
        print(name, row["top1"], flush=True)


if __name__ == "__main__":
    main()
