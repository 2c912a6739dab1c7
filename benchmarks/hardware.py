"""How well tables, predictor and whole-network costs agree with the clock, on ResNet-18.

    python benchmarks/hardware.py --targets cpu,cpu:onnxruntime:b8     # measure these, one process each
    python benchmarks/hardware.py                                      # print what was measured last

For every target: the table of the default space, a second one measured right after it (GPU, or --twice), nine whole
networks to fit the cost of a network, and twenty others, ten drawn by `random_plan` and ten with an independent uniform
choice in every layer, whose latency is predicted and measured. Tables and results are kept beside this script.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
from common import console, verdict
from rich.table import Table as RichTable

import haloc
from haloc.cost.measure import label
from haloc.files import read_json, write_json
from haloc.forms import Dense

FOLDER = Path(__file__).with_name("hardware")
TARGETS = [f"cpu:{runtime}:b{batch}" for runtime in ("eager", "onnxruntime", "openvino") for batch in (1, 8)]
TARGETS += [f"cuda:{runtime}:{kind}:b128" for runtime in ("graph", "compile") for kind in ("fp32", "fp16:nhwc")]
#: Median and worst error of whole networks; agreement of two tables; the predictor's error; seconds for a table.
NETWORK_BAR, WORST_BAR, REPEAT_BAR, PREDICTOR_BAR = 0.05, 0.10, 0.03, 0.10
SECONDS_BAR = {"cpu": 600, "cuda": 90}
PLANS, SHARE = 20, "20%"


def uniform_choice(space: haloc.RankSpace, seed: int) -> haloc.Plan:
    """A plan with an independent choice in every layer."""
    drawn = random.Random(seed)
    return haloc.Plan({name: drawn.choice(list(choices)) for name, choices in space.open_layers.items()})


def held_out_plans(space: haloc.RankSpace) -> dict[str, haloc.Plan]:
    drawn = {f"level-{seed}": haloc.random_plan(space, 1000 + seed) for seed in range(PLANS // 2)}
    return drawn | {f"uniform-{seed}": uniform_choice(space, 2000 + seed) for seed in range(PLANS // 2)}


def measured(spec: str, twice: bool, keep: bool, folder: Path) -> dict:
    """Everything about one target; with ``keep`` the table that is there is not measured again."""
    target = haloc.Target.parse(spec)
    model, image = haloc.create("resnet18"), torch.randn(1, 3, 224, 224)
    layers = haloc.inspect(model, image)
    space = haloc.rank_space(layers)
    path = folder / f"{str(target).replace(':', '_')}.table.json"
    before = read_json(path.with_suffix("").with_suffix(".json")) if keep else {}
    if not keep:
        path.unlink(missing_ok=True)
    start = time.perf_counter()
    table = haloc.measure(space, target, path=path)
    seconds = time.perf_counter() - start
    again = haloc.measure(space, target) if twice else None
    known, plans = haloc.sample_plans(space), held_out_plans(space)
    # All in one call, so that they take turns: a shared machine is faster in one minute than in the next.
    timings = timed_networks(model, image, known | plans, target)
    cost = haloc.NetworkCost(layers, table, timings[: len(known)])
    predictions = {name: cost.of(plan) for name, plan in plans.items()}
    truth = dict(zip(plans, timings[len(known) :], strict=True))
    dense = timings[0].latency_ms
    return {
        "target": str(target),
        "environment": dict(table.environment),
        "rows": len(table),
        "noisy_rows": sum(row.noisy for row in table.rows),
        "table_seconds": before.get("table_seconds", round(seconds, 1)),
        "repeat_error": before.get("repeat_error", repeat_error(table, again) if again else None),
        "dense_ms": dense,
        "error_bar": cost.error,
        "networks": {
            name: {
                "macs": round(layers.macs_of(plan) / layers.macs, 4),
                "predicted_ms": predictions[name].value,
                "measured_ms": truth[name].latency_ms,
                "noisy": truth[name].noisy,
                "error": predictions[name].value / truth[name].latency_ms - 1,
            }
            for name, plan in plans.items()
        },
    }


def timed_networks(model: torch.nn.Module, image: torch.Tensor, plans: dict, target: haloc.Target) -> list:
    """Timings in the order of the plans; those that stayed noisy are taken again, twice at most."""
    timings = list(haloc.time_networks(model, image, plans, target).timings)
    for _ in range(2):
        noisy = {str(number): timing.plan for number, timing in enumerate(timings) if timing.noisy}
        again = haloc.time_networks(model, image, noisy, target).timings if noisy else ()
        for number, timing in zip(noisy, again, strict=True):
            timings[int(number)] = timing
    return timings


def repeat_error(first: haloc.Table, second: haloc.Table) -> float:
    """How far the median row of two tables differs."""
    return median(abs(second.row(row.shape, row.form).latency_ms / row.latency_ms - 1) for row in first.rows)


def predictor_errors(table: haloc.Table) -> list[float]:
    """Errors on the rows that a predictor fitted on a fifth of them has not seen."""
    chosen = set(haloc.choose_rows([(row.shape, row.form) for row in table.rows], SHARE))
    known = tuple(row for row in table.rows if (row.shape, row.form) in chosen)
    predictor = haloc.fit_predictor(haloc.Table(table.target, known, table.environment))
    others = [row for row in table.rows if (row.shape, row.form) not in chosen]
    return [abs(predictor.price(row.shape, row.form).value / row.latency_ms - 1) for row in others]


def show_target(result: dict, table: haloc.Table) -> None:
    device = result["environment"]["device"]
    shown = RichTable(title=f"{result['target']} on {device}: dense {result['dense_ms']:.3f} ms")
    for column in ("plan", "MACs", "predicted ms", "measured ms", "error", "of dense"):
        shown.add_column(column, justify="right")
    for name, row in result["networks"].items():
        share = f"{row['measured_ms'] / result['dense_ms']:.2f}"
        times = (f"{row['predicted_ms']:.3f}", f"{row['measured_ms']:.3f}")
        shown.add_row(name, f"{row['macs']:.0%}", *times, f"{row['error']:+.1%}", share)
    console.print(shown)
    shapes = list(dict.fromkeys(row.shape for row in table.rows))
    dense = [label(shape) for shape in shapes if table.fastest(shape) == Dense()]
    console.print(f"dense is fastest in {len(dense)} of {len(shapes)} layers: {', '.join(dense) or 'none'}\n")


def show(results: list[dict], folder: Path) -> bool:
    tables = {r["target"]: haloc.Table.load(folder / f"{r['target'].replace(':', '_')}.table.json") for r in results}
    for result in results:
        show_target(result, tables[result["target"]])
    shown = RichTable(title="ResNet-18, 224×224")
    for column in (
        "target",
        "rows",
        "noisy",
        "table s",
        "networks: median",
        "worst",
        "error bar",
        "again",
        "predictor",
    ):
        shown.add_column(column, justify="right")
    shown.add_column("bars")
    passed = []
    for result in results:
        cells, held = summary(result, tables[result["target"]])
        passed.append(held)
        shown.add_row(*cells, verdict(held))
    console.print(shown)
    return all(passed)


def summary(result: dict, table: haloc.Table) -> tuple[tuple[str, ...], bool]:
    errors = [abs(row["error"]) for row in result["networks"].values()]
    predictor = median(predictor_errors(table))
    again, device = result["repeat_error"], result["target"].split(":")[0]
    held = median(errors) <= NETWORK_BAR and max(errors) <= WORST_BAR and predictor <= PREDICTOR_BAR
    held &= result["table_seconds"] <= SECONDS_BAR[device] and (again is None or again <= REPEAT_BAR)
    cells = (result["target"], str(result["rows"]), str(result["noisy_rows"]), f"{result['table_seconds']:.0f}")
    cells += (f"{median(errors):.1%}", f"{max(errors):.1%}", f"{result['error_bar']:.1%}")
    cells += ("" if again is None else f"{again:.2%}", f"{predictor:.1%}")
    return cells, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", help="measure these, with commas between; 'cpu' and 'cuda' for all of a device")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--twice", action="store_true", help="measure every table twice; on the GPU always")
    parser.add_argument(
        "--keep-tables", action="store_true", help="time whole networks only, with the tables there are"
    )
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    if options.one:
        twice = (options.twice or options.one.startswith("cuda")) and not options.keep_tables
        result = measured(options.one, twice, options.keep_tables, options.output)
        write_json(options.output / f"{result['target'].replace(':', '_')}.json", result)
        return
    wanted = options.targets.split(",") if options.targets else []
    wanted = [
        spec
        for word in wanted
        for spec in ([t for t in TARGETS if t.startswith(word)] if word in SECONDS_BAR else [word])
    ]
    options.output.mkdir(exist_ok=True)
    for spec in wanted:
        console.print(f"measuring {spec}")
        flags = ["--twice"] * options.twice + ["--keep-tables"] * options.keep_tables
        # A process each: thread pools of one runtime would disturb the next.
        subprocess.run([sys.executable, __file__, "--one", spec, "--output", options.output, *flags], check=True)
    files = [options.output / f"{str(haloc.Target.parse(t)).replace(':', '_')}.json" for t in [*TARGETS, *wanted]]
    results = [read_json(file) for file in dict.fromkeys(files) if file.exists()]
    sys.exit(0 if show(results, options.output) else 1)


if __name__ == "__main__":
    main()
