"""Times plans beside the dense network, predicts them from their own rows, and keeps both.

    python benchmarks/imagenet/speed.py resnet18 cpu:onnxruntime:b1 cpu:openvino:b1 --size 224
    python benchmarks/imagenet/speed.py mobilenet_v2 cuda:graph:fp32:b128 --output benchmarks/imagenet/speed/mine.json

For every target it calls `haloc measure --plan` with all plans of the network and, for every plan, `haloc predict
--measure`; what was measured is taken up again when it is called again. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from kept import REPEATS, Row, keep, on_each

HERE = Path(__file__).resolve().parent
PLANS = {
    "resnet18": {
        "resnet18-haloc (Tiny-ImageNet)": HERE.parent / "tiny_imagenet" / "plans" / "resnet18-haloc.json",
        "resnet18-70": HERE / "plans" / "resnet18-70.json",
        "resnet18-50": HERE / "plans" / "resnet18-50.json",
    },
    "mobilenet_v2": {"mobilenet_v2-85": HERE / "plans" / "mobilenet_v2-85.json"},
}


def haloc(*words: str) -> str:
    """What a verb prints."""
    ran = subprocess.run([sys.executable, "-m", "haloc", *words], stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"haloc {words[0]} ended with code {ran.returncode}, for the reason above")
    return ran.stdout


def rows_of(network: str, target: str, options: argparse.Namespace) -> Iterator[Row]:
    """Every plan on one target."""
    size, asic = options.size, target.startswith("eyeriss")
    table, shape = options.work / f"plans-{network}-{size}-{_file(target)}", f"1x3x{size}x{size}"
    where = ("--target", target, "--output", str(table), "--input", shape, "--networks", str(options.networks))
    haloc("measure", network, *(word for plan in PLANS[network].values() for word in ("--plan", str(plan))), *where)
    for name, plan in PLANS[network].items():
        words = ("predict", network, "--plan", str(plan), "--table", str(table), "--input", shape, "--json")
        repeats = 1 if asic else options.repeats or REPEATS[target.partition(":")[0]]
        times = [json.loads(haloc(*words, *(() if asic else ("--measure",)))) for _ in range(repeats)]
        yield {"network": network, "size": size, "plan": name, "target": target, **_figures(times)}


def _figures(times: list[dict[str, Any]]) -> dict[str, Any]:
    """What is predicted, the same every time, and what the clock says in the middle."""
    kept = {key: times[0][key] for key in ("latency_ms", "energy_mj") if key in times[0]}
    if "measured_ms" in times[0]:
        found = [told["measured_ms"] for told in times]
        kept["measured_ms"] = {key: [median(each[key][0] for each in found)] for key in ("dense", "plan")}
    return kept


def _file(target: str) -> str:
    return f"{target.replace(':', '_')}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=PLANS)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--networks", type=int, default=9, help="whole networks that are timed for the prediction")
    parser.add_argument("--repeats", type=int, help="how often plans are timed; as a rule 5 times, on a GPU once")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "haloc-speed", help="for tables")
    parser.add_argument("--output", type=Path, help="one file for all targets; as a rule each has one in speed/")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)

    def work(target: str) -> None:
        output = options.output or HERE / "speed" / f"{options.network}-{options.size}-{_file(target)}"
        for row in rows_of(options.network, target, options):
            keep(output, [row])
            print(row, flush=True)

    on_each(options.targets, work)


if __name__ == "__main__":
    main()
