"""Times plans beside the dense network, predicts them from a table, and keeps both.

    python benchmarks/imagenet/speed.py resnet18 cpu:onnxruntime:b1 --size 224
    python benchmarks/imagenet/speed.py mobilenet_v2 cpu:openvino:b1

It calls `haloc measure` and, for every plan of the network, `haloc predict --measure`; what was measured is taken up
again when it is called again. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from haloc.files import write_json

HERE = Path(__file__).resolve().parent
PLANS = {
    "resnet18": {
        "resnet18-haloc (Tiny-ImageNet)": HERE.parent / "tiny_imagenet" / "plans" / "resnet18-haloc.json",
        "resnet18-70": HERE / "plans" / "resnet18-70.json",
        "resnet18-50": HERE / "plans" / "resnet18-50.json",
    },
    "mobilenet_v2": {"mobilenet_v2-85": HERE / "plans" / "mobilenet_v2-85.json"},
}
#: The ranks that these plans were chosen from.
GRIDS = {"resnet18": ("paper", "32"), "mobilenet_v2": ("paper",)}
#: How often networks are timed; the median counts.
REPEATS = 5
FORMS = {"resnet18": "tucker2,spatial,svd", "mobilenet_v2": "svd"}


def haloc(*words: str) -> str:
    """What a verb prints."""
    ran = subprocess.run([sys.executable, "-m", "haloc", *words], stdout=subprocess.PIPE, text=True, check=True)
    return ran.stdout


def rows_of(network: str, target: str, size: int, share: str, work: Path) -> list[dict[str, Any]]:
    """Every plan on one target."""
    table, shape = work / f"{network}-{target.replace(':', '_')}-{size}.json", f"1x3x{size}x{size}"
    for grid in GRIDS[network]:
        how = ("--forms", FORMS[network], "--round-to", grid, "--rows", share)
        haloc("measure", network, "--target", target, *how, "--output", str(table), "--input", shape)
    asic, rows = target.startswith("eyeriss"), []
    for name, plan in PLANS[network].items():
        words = ["predict", network, "--plan", str(plan), "--table", str(table), "--input", shape, "--json"]
        times = [json.loads(haloc(*words, *(() if asic else ("--measure",)))) for _ in range(1 if asic else REPEATS)]
        kept = {key: times[0][key] for key in ("latency_ms", "energy_mj") if key in times[0]}
        if not asic:  # a machine drifts by some percent within minutes
            found = [told["measured_ms"] for told in times]
            kept["measured_ms"] = {key: [median(each[key][0] for each in found)] for key in ("dense", "plan")}
        rows.append({"network": network, "size": size, "plan": name, "target": target, **kept})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=PLANS)
    parser.add_argument("target")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rows", default="30%", help="the share of the table that is measured; the rest is predicted")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "haloc-speed")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = rows_of(options.network, options.target, options.size, options.rows, options.work)
    name = f"{options.network}-{options.size}-{options.target.replace(':', '_')}.json"
    write_json(HERE / "speed" / name, {"rows": rows})


if __name__ == "__main__":
    main()
