"""Exported files: as fast as the ones that tables are measured with, faithful, and how they fare in 8 bits.

Tables and timings of whole networks use files of torch's older exporter for exactly one batch; what a user gets comes
from the present one and takes any batch. Both are timed in onnxruntime on one thread, taking turns. Then ResNet-20 on
CIFAR-10, dense and with half the ranks everywhere (activation-aware, recalibrated, not fine-tuned), in fp32 and int8.

Besides the clock on the wall, which `time_files` reads, the time that the one thread was computing is taken: on a
machine that others use as well the former was seen to differ by half for one file from one minute to the next.

Bars: a file computes at most 1.05 times as long as the table's file; int8 costs at most one point of accuracy.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from common import console, save, verdict
from rich.table import Table
from torch import nn

import haloc
from haloc.artifact.quantise import METHODS, quantise
from haloc.artifact.runtime import OnnxModule, time_files
from haloc.cost.deploy import export_onnx, fold_batchnorm
from haloc.forms import scaled_form
from haloc.zoo import IMAGENET, Splits, create, load_data

TARGET = "cpu:onnxruntime:t1"
SLOWER_BAR, ACCURACY_BAR = 1.05, 0.01


def target(batch: int) -> haloc.Target:
    return haloc.Target.parse(f"{TARGET}:b{batch}")


def computing_ms(files: dict[str, Path], inputs: torch.Tensor, rounds: int = 12, runs: int = 8) -> dict[str, float]:
    """Milliseconds that one thread computes for a run: the median over visits that take turns, in changing order."""
    visits: dict[str, list[float]] = {name: [] for name in files}
    for number in range(rounds):
        for name in sorted(files, reverse=number % 2 == 1):
            module = OnnxModule(files[name], threads=1)
            feeds = module.feeds(inputs)
            visits[name].append(median([_thread_ms(module, feeds) for _ in range(runs)][2:]))
            module.close()
    return {name: median(found) for name, found in visits.items()}


def _thread_ms(module: OnnxModule, feeds: dict) -> float:
    start = time.thread_time()
    module._run(feeds)
    return (time.thread_time() - start) * 1e3


def half_ranks(model: nn.Module, image: torch.Tensor) -> haloc.Plan:
    layers = haloc.inspect(model, image)
    inner = [layer for layer in layers if layer.name.startswith("layer") and "tucker2" in layer.families]
    return haloc.Plan({layer.name: scaled_form(layer.shape, "tucker2", 0.5) for layer in inner})


def exporters(name: str, size: int, batches: tuple[int, ...], folder: Path) -> list[dict]:
    """Both exporters' files of a network, dense and with half the ranks, against each other."""
    rows, image = [], torch.randn(1, 3, size, size)
    dense = create(name)
    networks = {"dense": dense, "half ranks": haloc.apply_plan(dense, half_ranks(dense, image))}
    for kind, network in networks.items():
        made = haloc.export(network, folder / "ours.onnx", image)
        for batch in batches:
            inputs = torch.randn(batch, 3, size, size)
            export_onnx(fold_batchnorm(network, image), inputs, folder / "table.onnx")
            files = {"table": folder / "table.onnx", "ours": folder / "ours.onnx"}
            found = {key: [each.value, each.error] for key, each in time_files(files, inputs, target(batch)).items()}
            row = {"network": name, "kind": kind, "batch": batch, "latency_ms": found}
            row |= {"computing_ms": computing_ms(files, inputs), "off_by": made.parity["random"].relative}
            rows.append(row)
            console.print(rows[-1])
    return rows


def eight_bits(data: Splits, folder: Path) -> list[dict]:
    """Accuracy, size and latency of ResNet-20 in fp32 and int8."""
    dense, rows = create("resnet20", weights="pretrained"), []
    plan = half_ranks(dense, torch.zeros(1, 3, 32, 32))
    small = haloc.apply_plan(dense, plan, moments=haloc.calibrate(dense, augmented(data, 1000), plan))
    haloc.recalibrate(small, augmented(data, 2000))
    for kind, network in (("dense", dense), ("half ranks", small)):
        exact = folder / "fp32.onnx"
        haloc.export(network, exact, torch.zeros(1, 3, 32, 32), samples=data.test.batches(64, normalisation=IMAGENET))
        files = {"fp32": exact}
        for method in METHODS:
            for narrow in (False, True):
                files[f"int8 {method}{', 7-bit weights' if narrow else ''}"] = path = folder / f"{method}{narrow}.onnx"
                samples = data.train.batches(64, normalisation=IMAGENET, shuffle=True)
                quantise(exact, path, samples, method=method, reduce_range=narrow)
        inputs = {batch: torch.randn(batch, 3, 32, 32) for batch in (64, 1)}
        wall = {batch: time_files(_two(files), values, target(batch)) for batch, values in inputs.items()}
        thread = {batch: computing_ms(_two(files), values) for batch, values in inputs.items()}
        for name, path in files.items():
            times = {
                f"b{batch}_ms": [found[name].value, found[name].error] for batch, found in wall.items() if name in found
            }
            times |= {f"b{batch}_computing_ms": found[name] for batch, found in thread.items() if name in found}
            rows.append({"kind": kind, "file": name, "bytes": path.stat().st_size, "top1": top1(path, data)} | times)
            console.print(rows[-1])
    return rows


def _two(files: dict[str, Path]) -> dict[str, Path]:
    """How ranges were found does not change how fast a file is."""
    return {name: path for name, path in files.items() if name in ("fp32", "int8 minmax")}


def augmented(data: Splits, images: int):
    return data.train.batches(250, normalisation=IMAGENET, augment=True, shuffle=True, limit=images)


def top1(path: Path, data: Splits) -> float:
    return haloc.evaluate(OnnxModule(path), data.test.batches(500, normalisation=IMAGENET)).top1


def tables(results: dict) -> list[Table]:
    files = Table(title="files of both exporters in onnxruntime, one thread: milliseconds")
    for column in (
        "network",
        "",
        "batch",
        "table's",
        "ours",
        "computing",
        "",
        "ratio",
        "off by",
        f"at most {SLOWER_BAR}",
    ):
        files.add_column(column)
    for row in results["exporters"]:
        theirs, ours = row["latency_ms"]["table"], row["latency_ms"]["ours"]
        shown = [f"{value:.3f} ± {error:.3f}" for value, error in (theirs, ours)]
        shown += [f"{row['computing_ms'][name]:.3f}" for name in ("table", "ours")]
        ratio = row["computing_ms"]["ours"] / row["computing_ms"]["table"]
        cells = (row["network"], row["kind"], str(row["batch"]), *shown, f"{ratio:.3f}", f"{row['off_by']:.0e}")
        files.add_row(*cells, verdict(ratio <= SLOWER_BAR))
    bits = Table(title="ResNet-20 on CIFAR-10, no fine-tuning")
    for column in (
        "network",
        "file",
        "KiB",
        "top-1",
        "batch 64 (ms)",
        "computing",
        "batch 1 (ms)",
        "computing",
        "a point",
    ):
        bits.add_column(column)
    exact = {row["kind"]: row["top1"] for row in results["int8"] if row["file"] == "fp32"}
    for row in results["int8"]:
        times = []
        for key in ("b64", "b1"):
            known = f"{key}_ms" in row
            times += (
                [f"{row[f'{key}_ms'][0]:.3f} ± {row[f'{key}_ms'][1]:.3f}", f"{row[f'{key}_computing_ms']:.3f}"]
                if known
                else ["", ""]
            )
        held = verdict(exact[row["kind"]] - row["top1"] <= ACCURACY_BAR)
        bits.add_row(row["kind"], row["file"], f"{row['bytes'] / 1024:.0f}", f"{row['top1']:.2%}", *times, held)
    return [files, bits]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder CIFAR-10 lies in")
    options = parser.parse_args()
    data = load_data("cifar10", root=options.data_root)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        results = {"target": TARGET, "int8": eight_bits(data, folder)}
        results["exporters"] = [
            *exporters("resnet20", 32, (64, 1), folder),
            *exporters("resnet18", 224, (8, 1), folder),
        ]
    save(__file__, results)
    for table in tables(results):
        console.print(table)


if __name__ == "__main__":
    main()
