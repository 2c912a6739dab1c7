"""Choosing ranks: HALOC's search and its settings, the methods it is compared with, and what a search costs.

Without arguments it prints the last committed run of every part, from ``search/``. A part is measured again with

    python benchmarks/search.py ablation --device cuda   # searches with different settings
    python benchmarks/search.py trials --device cuda     # their plans, fine-tuned briefly, judged on held-out images
    python benchmarks/search.py plans --device cuda      # every method's plan at 28% of the MACs, 24% of the params
    python benchmarks/search.py methods --device cuda    # those plans, fine-tuned for 60 epochs by one recipe
    python benchmarks/search.py cost --device cuda       # an epoch of the search beside one of plain training; memory
    python benchmarks/search.py discrepancy              # error against rank discrepancy at equal parameters

All parts go on where they were interrupted: a row that is in the file is not measured again (``--afresh`` does;
``cost --again`` keeps the earlier runs beside the new one, since they differ by a quarter).
Several processes may measure rows of one part (``--only``). The ablation also tells the training loss with and without
the feature-map term.

Bars: HALOC's plan, fine-tuned, beats every other method's (one seed for all, three for the strongest); a search epoch
at most 4 times a plain one, memory with shared factors at most twice; the training loss lower with the feature maps.
"""

from __future__ import annotations

import argparse
import fcntl
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import console, machine, verdict
from pruning import load_pruned
from rich.table import Table
from torch import nn

import haloc
from haloc.factor.discrepancy import discrepancies
from haloc.files import read_json, write_json
from haloc.methods.search import METHODS, method_of
from haloc.training.objective import distillation
from haloc.zoo import IMAGENET, Splits, create, load_data

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "search"
BUDGET = {"macs": "28%", "params": "24%"}
FORMS = ("tucker2", "tucker2-out", "tucker2-in", "spatial", "svd")
BATCH = 512
FAST = {"precision": "bf16", "channels_last": True}
EPOCH_BAR, MEMORY_BAR = 4.0, 2.0

#: One recipe for the plans of all methods.
FINETUNING = haloc.TrainSettings(epochs=60, lr=0.05, weight_decay=1e-4, warmup_epochs=2, speed="graph", **FAST)
#: A shorter one, for comparing settings.
TRIAL = replace(FINETUNING, epochs=20)
#: Without BatchNorms between the factors, whose biases would stay behind: all networks have the size of their plan.
RECOVERY = haloc.RecoverySettings(norm_between=False)
#: How weights are trained in a search.
SEARCHING = haloc.TrainSettings(epochs=15, lr=0.02, weight_decay=1e-4, warmup_epochs=0, **FAST)

#: What the settings of the ablation are changed from.
BASE: dict[str, Any] = {
    "gradient": "all", "weights": "shared", "one_sided": True, "lam": 0.1, "lam_end": None, "temperature_end": 0.1,
    "alpha_lr": 0.01, "alpha_every": 1, "start": "sensitivity", "start_spread": 0.5, "soft": False,
    "rounds": 0,
}  # fmt: skip
#: What `haloc.SearchSettings` has in other ways than the base.
DEFAULTS: dict[str, Any] = {"temperature_end": 1.0, "alpha_lr": 0.03, "alpha_every": 4}
#: Settings against each other.
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "gradient: pair": {"gradient": "pair"},
    "gradient: single": {"gradient": "single"},
    "gradient: mixture every 4th step": {"gradient": "mixture", "alpha_every": 4},
    "weights: own": {"weights": "own"},
    "penalty on both sides": {"one_sided": False},
    "λ = 0": {"lam": 0.0},
    "λ = 1": {"lam": 1.0},
    "λ falls to 0": {"lam_end": 0.0},
    "temperature 1 throughout": {"temperature_end": 1.0},
    "all candidates alike at first": {"start": "alike"},
    "starts with less doubt": {"start_spread": 0.25},
    "faster α": {"alpha_lr": 0.03},
    "answers of the uncompressed network": {"soft": True},
    "whole networks at the end": {"rounds": 8},
    "defaults": DEFAULTS,
    "defaults and λ = 1": DEFAULTS | {"lam": 1.0},
    "defaults and whole networks at the end": DEFAULTS | {"rounds": 8, "images": 4096},
}
#: The plan of a search as it comes, beside the best of all searches.
AS_IT_COMES = "haloc-defaults"


# --- what all parts share -----------------------------------------------------------------------------------------


def network(device: str) -> nn.Module:
    return create("resnet20", weights="pretrained").to(device).eval()


def space_of(dense: nn.Module, forms: Iterable[str] = FORMS) -> haloc.RankSpace:
    device = next(dense.parameters()).device
    return haloc.rank_space(haloc.inspect(dense, torch.zeros(1, 3, 32, 32, device=device)), forms=tuple(forms))


def feed(images, batch: int, options: argparse.Namespace, **how: Any):
    how = {"augment": True, "shuffle": True, "limit": options.limit} | how
    return images.on(options.device).batches(batch, normalisation=IMAGENET, **how)


def moments_of(dense: nn.Module, names: Iterable[str], images, options: argparse.Namespace):
    some = images.on(options.device).batches(250, normalisation=IMAGENET, augment=True, shuffle=True, limit=1000)
    return haloc.calibrate(dense, some, list(names))


def shortened(settings: haloc.TrainSettings, options: argparse.Namespace) -> haloc.TrainSettings:
    """The recipe, with fewer epochs if that was asked for."""
    return replace(settings, epochs=options.epochs) if options.epochs else settings


def settings_of(options: argparse.Namespace, **changes: Any) -> haloc.SearchSettings:
    """The defaults with some changes; a search that is tried out for a few epochs has little warm-up."""
    settings = replace(haloc.SearchSettings(), **changes)
    epochs = shortened(SEARCHING, options).epochs
    return replace(settings, warmup_epochs=min(settings.warmup_epochs, epochs - 1))


def parts_of(data: Splits) -> tuple[Any, Any, Any]:
    """What weights learn from, what probabilities learn from, and what settings are judged by."""
    return data.train.subset(range(5000, len(data.train))), data.val, data.train.subset(range(5000))


def searched(dense: nn.Module, weights_on, alpha_on, options: argparse.Namespace, settings: haloc.SearchSettings):
    """HALOC's search as all parts run it."""
    space = space_of(dense)
    return haloc.search(
        dense,
        space,
        budget=BUDGET,
        settings=settings,
        moments=moments_of(dense, space.open_layers, weights_on, options),
        train=feed(weights_on, BATCH, options),
        val=feed(alpha_on, BATCH, options, augment=False),
        training=shortened(SEARCHING, options),
    )


def finetuned(small: nn.Module, dense: nn.Module, images, options: argparse.Namespace, settings) -> float:
    """Fine-tunes in place, and returns the seconds that took."""
    batches = feed(images, BATCH, options, seed=settings.seed)
    settings = shortened(settings, options)
    return haloc.finetune(small, batches, teacher=dense, settings=settings, recovery=RECOVERY).seconds


@torch.no_grad()
def distance(small: nn.Module, dense: nn.Module, images, options: argparse.Namespace) -> float:
    """How far a network's answers are from the dense one's, in the mean: less noisy than an accuracy."""
    small.eval()
    batches = feed(images, 1000, options, augment=False, shuffle=False)
    return statistics.mean(float(distillation(small(inputs), dense(inputs), 1.0)) for inputs, _ in batches)


def each_row(path: Path, options: argparse.Namespace, rows: dict[str, Callable[[], dict]], **header: Any) -> dict:
    """Measures the rows that are not in the file yet, or were asked for, and writes the file after each."""
    found = read_json(path) if path.is_file() else {"rows": {}}
    wanted = options.only.split(",") if options.only else list(rows)
    unknown = [name for name in wanted if name not in rows]
    if unknown:
        sys.exit(f"there are no rows {', '.join(unknown)}; the rows are {', '.join(rows)}")
    for name in wanted:
        if options.afresh or options.again or name not in found["rows"]:
            start = time.perf_counter()
            row = rows[name]() | {"seconds": time.perf_counter() - start, "device": options.device}
            with _locked(path):  # another process may have written rows in the meantime
                found = read_json(path) if path.is_file() else found
                found["rows"][name] = row
                write_json(path, {"machine": machine(), **header, "rows": found["rows"]})
            console.print(f"{name}: {_short(found['rows'][name])}", highlight=False)
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _short(row: dict) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, int | float))


# --- ablation: the settings of the search -------------------------------------------------------------------------


def ablation(options: argparse.Namespace) -> None:
    dense, data = network(options.device), load_data("cifar10", root=options.data_root)
    weights_on, alpha_on, _ = parts_of(data)

    def row(changes: dict[str, Any]) -> dict:
        settings = settings_of(options, **BASE | changes)
        start = time.perf_counter()
        result = searched(dense, weights_on, alpha_on, options, settings)
        history = result.evidence.history
        kept = ("epoch", "cross_entropy", "accuracy", "val_expected_params", "val_likeliest_params", "val_entropy")
        return {
            "changes": changes,
            "search_s": time.perf_counter() - start,
            "likeliest_macs": history[-1]["val_likeliest_macs"] / result.spending[0].budget,
            **{spent.quantity: spent.remains for spent in result.spending},
            "history": [{name: epoch[name] for name in kept} for epoch in history],
            "plan": result.plan.to_dict(),
        }

    rows = {name: (lambda changes=changes: row(changes)) for name, changes in VARIANTS.items()}
    each_row(options.output / "ablation.json", options, rows, base=BASE, searching=asdict(SEARCHING))


def trials(options: argparse.Namespace) -> None:
    """All plans there are, fine-tuned briefly on the images of the search and judged on others."""
    dense, data = network(options.device), load_data("cifar10", root=options.data_root)
    weights_on, _, judged_by = parts_of(data)

    def row(plan: haloc.Plan, seed: int) -> dict:
        moments = moments_of(dense, plan.changes(), weights_on, options)
        small = haloc.apply_plan(dense, plan, moments=moments)
        finetuned(small, dense, weights_on, options, replace(TRIAL, seed=seed))
        top1 = haloc.evaluate(small, feed(judged_by, 1000, options, augment=False)).top1
        return {"distance": distance(small, dense, judged_by, options), "top1": top1}

    found = plans_there_are(options.output)
    seeds = range(options.seeds)
    rows = {f"{name} {seed}": (lambda p=plan, s=seed: row(p, s)) for name, plan in found.items() for seed in seeds}
    each_row(options.output / "trials.json", options, rows, trial=asdict(TRIAL))


def plans_there_are(folder: Path) -> dict[str, haloc.Plan]:
    """Those of the searches of the ablation, and those of the other methods."""
    rows = read_json(folder / "ablation.json")["rows"] if (folder / "ablation.json").is_file() else {}
    found = {name: haloc.Plan.from_dict(rows[name]["plan"]) for name in VARIANTS if name in rows}
    paths = {name: folder / "plans" / f"{name}.json" for name in METHODS if name != "haloc"}
    return found | {f"method {name}": haloc.Plan.load(path) for name, path in paths.items() if path.is_file()}


def means_of(found: dict, key: str) -> dict[str, float]:
    """Of every plan, over its seeds."""
    values: dict[str, list[float]] = {}
    for name, row in found["rows"].items():
        values.setdefault(name.rsplit(" ", 1)[0], []).append(row[key])
    return {name: statistics.mean(own) for name, own in values.items()}


def show_trials(found: dict) -> None:
    distances, scores = means_of(found, "distance"), means_of(found, "top1")
    table = Table(title=f"plans fine-tuned for {found['trial']['epochs']} epochs, judged on 5,000 images held out")
    for column in ("plan", "KL to the uncompressed network", "top-1", "seeds"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for name in sorted(distances, key=distances.__getitem__):
        seeds = sum(key.rsplit(" ", 1)[0] == name for key in found["rows"])
        table.add_row(name, f"{distances[name]:.4f}", f"{scores[name]:.2%}", str(seeds))
    console.print(table)


def show_ablation(found: dict) -> None:
    table = Table(title="searches, one setting changed at a time")
    for column in ("settings", "MACs", "params", "MACs of the likeliest", "entropy", "cross-entropy"):
        table.add_column(column, justify="left" if column == "settings" else "right")
    for name, row in found["rows"].items():
        last = row["history"][-1]
        shares = (f"{row['macs']:.2%}", f"{row['params']:.2%}", f"{row['likeliest_macs']:.2f} of the budget")
        table.add_row(name, *shares, f"{last['val_entropy']:.2f}", f"{last['cross_entropy']:.4f}")
    console.print(table)
    show_features(found)


def show_features(found: dict) -> None:
    """The paper's Fig. 4a."""
    pair = [found["rows"][name]["history"] for name in ("base", "λ = 0") if name in found["rows"]]
    if len(pair) < 2:
        return
    table = Table(title="training loss (cross-entropy) of the search (Fig. 4a)")
    for column in ("epoch", "with feature maps", "without"):
        table.add_column(column, justify="right")
    for first, second in zip(*pair, strict=True):
        table.add_row(str(first["epoch"]), f"{first['cross_entropy']:.4f}", f"{second['cross_entropy']:.4f}")
    console.print(table)
    lower = pair[0][-1]["cross_entropy"] < pair[1][-1]["cross_entropy"]
    console.print(f"lower with feature maps at the end: {verdict(lower)}")


# --- plans and methods: the comparison ----------------------------------------------------------------------------


def plans(options: argparse.Namespace) -> None:
    """A plan from every method, all from the same space, images and calibration."""
    dense, data = network(options.device), load_data("cifar10", root=options.data_root)
    space = space_of(dense)
    moments = moments_of(dense, space.open_layers, data.train, options)

    def row(name: str) -> dict:
        if name in ("haloc", AS_IT_COMES):
            return plan_of_search(name, options.output)
        training = shortened(SEARCHING, options) if method_of(name).trains else None
        result = haloc.search(
            dense, space, budget=BUDGET, method=name, moments=moments, training=training,
            train=feed(data.train, BATCH, options), val=feed(data.val, BATCH, options, augment=False),
        )  # fmt: skip
        result.plan.save(options.output / "plans" / f"{name}.json")
        return {spent.quantity: spent.remains for spent in result.spending}

    rows = {name: (lambda name=name: row(name)) for name in [*METHODS, AS_IT_COMES]}
    each_row(options.output / "plans.json", options, rows, budget=BUDGET, searching=asdict(SEARCHING))


def plan_of_search(name: str, folder: Path) -> dict:
    """A plan that is there already: of the search with the defaults, or with the settings that did best on trial."""
    settings = best_of_trials(folder) if name == "haloc" else "defaults"
    row = read_json(folder / "ablation.json")["rows"][settings]
    haloc.Plan.from_dict(row["plan"]).save(folder / "plans" / f"{name}.json")
    return {"settings": settings, "macs": row["macs"], "params": row["params"]}


def best_of_trials(folder: Path) -> str:
    """The settings of the ablation whose plan did best; the other methods have one plan each."""
    if not (folder / "trials.json").is_file():
        sys.exit(
            "HALOC's plan is the best of the trials; run ablation and trials first, or name other rows with --only"
        )
    distances = means_of(read_json(folder / "trials.json"), "distance")
    return min((name for name in distances if name in VARIANTS), key=distances.__getitem__)


def methods(options: argparse.Namespace) -> None:
    """Every plan fine-tuned on all training images, and looked at on the test images before and after."""
    dense, data = network(options.device), load_data("cifar10", root=options.data_root)
    test = data.test.on(options.device).batches(1000, normalisation=IMAGENET)

    def small_of(name: str) -> nn.Module:
        if name == "pruning":
            return load_pruned().to(options.device)
        plan = haloc.Plan.load(options.output / "plans" / f"{name}.json")
        return haloc.apply_plan(dense, plan, moments=moments_of(dense, plan.changes(), data.whole, options))

    def row(name: str, seed: int) -> dict:
        small = small_of(name)
        raw = haloc.evaluate(small, test).top1
        seconds = finetuned(small, dense, data.whole, options, replace(FINETUNING, seed=seed))
        counted, whole = (haloc.inspect(x, torch.zeros(1, 3, 32, 32, device=options.device)) for x in (small, dense))
        shares = {"macs": counted.macs / whole.macs, "params": counted.params / whole.params}
        return {"raw": raw, "top1": haloc.evaluate(small, test).top1, "training_s": seconds, **shares}

    names = [*METHODS, AS_IT_COMES, "pruning"]
    rows = {f"{name} {seed}": (lambda n=name, s=seed: row(n, s)) for seed in range(options.seeds) for name in names}
    each_row(options.output / "methods.json", options, rows, finetuning=asdict(FINETUNING))


def show_methods(found: dict) -> None:
    runs: dict[str, list[dict]] = {}
    for key, row in found["rows"].items():
        runs.setdefault(key.rsplit(" ", 1)[0], []).append(row)
    means = {name: statistics.mean(row["top1"] for row in own) for name, own in runs.items()}
    table = Table(title="ResNet-20 on CIFAR-10 at 28% of the MACs and 24% of the parameters, fine-tuned for 60 epochs")
    for column in ("method", "MACs", "params", "not fine-tuned", "top-1, mean", "spread", "seeds"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name in sorted(means, key=means.__getitem__, reverse=True):
        own = runs[name]
        scores = [row["top1"] for row in own]
        spread = f"±{statistics.stdev(scores):.2%}" if len(scores) > 1 else ""
        each = ", ".join(f"{score:.2%}" for score in scores)
        shares = (f"{own[0][key]:.1%}" for key in ("macs", "params", "raw"))
        table.add_row(name, *shares, f"{means[name]:.2%}", spread, each)
    console.print(table)
    others = max((mean for name, mean in means.items() if name not in ("haloc", AS_IT_COMES)), default=1.0)
    if "haloc" in means:
        ahead = means["haloc"] - others
        console.print(f"HALOC beats every other plan: {verdict(ahead > 0)} ({100 * ahead:+.2f} points)")


# --- cost: time and memory of a search ----------------------------------------------------------------------------


def cost(options: argparse.Namespace) -> None:
    """Seconds per epoch and peak memory of the search and of plain training, same images and batch."""
    dense, data = network(options.device), load_data("cifar10", root=options.data_root)
    train, val = data.train.on(options.device), data.val.on(options.device)
    space = space_of(dense)
    moments = moments_of(dense, space.open_layers, train, options)
    path = options.output / f"cost-{options.device}.json"
    earlier = read_json(path)["rows"] if options.again and path.is_file() else {}

    def timed(name: str, work: Callable[[], list[dict]]) -> dict:
        gpu, before = options.device == "cuda", 0
        if gpu:  # images and what all rows hold do not count
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        ends = [row["seconds"] for row in work()]
        seconds = [end - start for start, end in pairwise(ends)]
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if gpu else None
        runs = [*epochs_of(earlier.get(name, {})), statistics.median(seconds or ends)]
        return {"epoch_s": statistics.median(runs), "peak_mib": peak, "runs": runs}

    def plain(speed: str) -> list[dict]:
        model, settings = create("resnet20").to(options.device), replace(SEARCHING, epochs=3, speed=speed)
        return haloc.train(model, feed(train, BATCH, options), settings=settings).history

    def search(weights: str) -> list[dict]:
        result = haloc.search(
            dense, space, budget=BUDGET, moments=moments, training=replace(SEARCHING, epochs=3),
            settings=haloc.SearchSettings(weights=weights, warmup_epochs=0, start="alike"),
            train=feed(train, BATCH, options), val=feed(val, BATCH, options, augment=False),
        )  # fmt: skip
        return list(result.evidence.history)

    rows: dict[str, Callable[[], dict]] = {}
    for speed in ("eager", "graph", "compile"):
        rows[f"plain {speed}"] = lambda speed=speed: timed(f"plain {speed}", lambda: plain(speed))
    for kind in ("own", "shared"):
        rows[f"search {kind} weights"] = lambda kind=kind: timed(f"search {kind} weights", lambda: search(kind))
    images = min(len(train), options.limit or len(train))
    each_row(path, options, rows, batch=BATCH, images=images)


def epochs_of(row: dict) -> list[float]:
    """Seconds of an epoch in every run there was."""
    return row.get("runs") or ([row["epoch_s"]] if row else [])


def ratios_of(row: dict, base: dict) -> list[float]:
    """How many times as long an epoch took, run by run: what slows one row of a run down slows down the others."""
    pairs = zip(epochs_of(row), epochs_of(base), strict=False)  # rows may have been measured more often than others
    return [seconds / plain for seconds, plain in pairs]


def _middle(values: list[float]) -> str:
    spread = f" ({min(values):.2f} to {max(values):.2f})" if max(values) > min(values) else ""
    return f"{statistics.median(values):.2f}{spread}"


def show_cost(found: dict) -> None:
    rows = found["rows"]
    bases = {name: rows[f"plain {name}"] for name in ("eager", "graph") if f"plain {name}" in rows}
    device = next(iter(rows.values()))["device"]
    table = Table(title=f"an epoch of ResNet-20, batch {found['batch']}, {found['images']} images, {device}")
    for column in ("work", "s", *(f"times plain {name}" for name in bases), "peak MiB", "times plain eager"):
        table.add_column(column, justify="left" if column == "work" else "right")
    for name, row in rows.items():
        ratios = (_middle(ratios_of(row, base)) for base in bases.values())
        peak = row["peak_mib"]
        memory = () if peak is None else (f"{peak:.0f}", f"{peak / bases['eager']['peak_mib']:.2f}")
        table.add_row(name, _middle(epochs_of(row)), *ratios, *memory)
    console.print(table)
    for name in (name for name in rows if name.startswith("search")):
        for base, plain in bases.items():
            ratios = ratios_of(rows[name], plain)
            kept = sum(ratio <= EPOCH_BAR for ratio in ratios)
            runs = f", and in {kept} of {len(ratios)} runs" if len(ratios) > 1 else ""
            held = verdict(statistics.median(ratios) <= EPOCH_BAR)
            console.print(f"{name} ≤ {EPOCH_BAR:g} plain epochs ({base}): {held}{runs}")
    shared = rows.get("search shared weights")
    if shared is not None and shared["peak_mib"] is not None:
        held = shared["peak_mib"] <= MEMORY_BAR * bases["eager"]["peak_mib"]
        console.print(f"peak memory with shared weights ≤ {MEMORY_BAR:g} times plain training's: {verdict(held)}")


# --- discrepancy: Fig. 3 ------------------------------------------------------------------------------------------


def discrepancy(options: argparse.Namespace) -> None:
    """The error of a layer against r(1) − r(2), for several numbers of parameters."""
    layer = network("cpu").get_submodule(options.layer)

    def row(weights: int) -> dict:
        rows = discrepancies(layer, weights)
        return {"points": [[point.difference, point.error] for point in rows]}

    sizes = [int(share * layer.weight.numel()) for share in (0.1, 0.2, 0.4)]
    rows = {str(size): (lambda size=size: row(size)) for size in sizes}
    each_row(options.output / "discrepancy.json", options, rows, layer=options.layer)


def show_discrepancy(found: dict) -> None:
    table = Table(title=f"error of {found['layer']} against ΔRank = r(1) − r(2), at equal parameters (Fig. 3)")
    for column in ("weights", "best ΔRank", "its error", "error at ΔRank nearest to 0", "worst error"):
        table.add_column(column, justify="right")
    for name, row in found["rows"].items():
        points = row["points"]
        best, equal = min(points, key=lambda p: p[1]), min(points, key=lambda p: abs(p[0]))
        worst = max(error for _, error in points)
        table.add_row(name, str(best[0]), f"{best[1]:.4f}", f"{equal[1]:.4f}", f"{worst:.4f}")
    console.print(table)


PARTS = {
    "ablation": (ablation, show_ablation), "trials": (trials, show_trials), "plans": (plans, None),
    "methods": (methods, show_methods), "cost": (cost, show_cost), "discrepancy": (discrepancy, show_discrepancy),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-root", default=None, help="folder with CIFAR-10")
    parser.add_argument("--output", type=Path, default=FOLDER, help="where results are written")
    parser.add_argument("--only", help="names of rows, separated by commas")
    parser.add_argument("--afresh", action="store_true", help="measure all rows again")
    parser.add_argument("--again", action="store_true", help="measure all rows once more, and keep the earlier runs")
    parser.add_argument("--epochs", type=int, help="epochs of every training, for trying the script out")
    parser.add_argument("--limit", type=int, help="images of every data set, for trying the script out")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--layer", default="layer3.1.conv2")
    options = parser.parse_args()
    if options.part:
        PARTS[options.part][0](options)
    for part, (_, show) in PARTS.items():
        if show is not None and options.part in (None, part):
            for path in sorted([*options.output.glob(f"{part}.json"), *options.output.glob(f"{part}-*.json")]):
                show(read_json(path))


if __name__ == "__main__":
    main()
