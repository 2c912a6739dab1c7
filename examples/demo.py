"""The ResNet-20 that comes with HALOC, at half its MACs: factorised, fine-tuned for a minute on the CPU, compared.

CIFAR-10 is found in the cache or downloaded once; where it cannot be had, the digits serve (see digits.py). Run it with
``make demo`` or ``python examples/demo.py``.
"""

from __future__ import annotations

import copy
import time

import digits
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

import haloc
from haloc.errors import DataError
from haloc.zoo import IMAGENET, Splits, load_data

BUDGET = 0.5
FORMS = ("spatial", "svd")
IMAGES, TESTED, CALIBRATED = 6_400, 2_000, 1_000
SETTINGS = haloc.TrainSettings(epochs=2, lr=5e-4, weight_decay=1e-4, warmup_epochs=0.2)
console = Console()


def fine_tuned(small: nn.Module, teacher: nn.Module, data: Splits) -> nn.Module:
    """A copy, trained for two rounds through a part of the training images, with a bar while it takes."""
    recovered = copy.deepcopy(small)
    batches = data.train.batches(128, normalisation=IMAGENET, augment=True, shuffle=True, limit=IMAGES)
    columns = (TextColumn("fine-tuning"), BarColumn(), TextColumn("{task.fields[loss]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("fine-tuning", total=SETTINGS.epochs, loss="")

        def show(progress: haloc.Progress) -> None:
            bar.update(task, completed=progress.epoch, loss=f"loss {progress.figures['loss']:.3f}")

        haloc.finetune(recovered, batches, teacher=teacher, settings=SETTINGS, on_progress=show)
    return recovered


def networks(model: nn.Module, plan: haloc.Plan, data: Splits) -> dict[str, nn.Module]:
    """The dense network and what becomes of it, step by step."""
    some = data.train.batches(250, normalisation=IMAGENET, augment=True, shuffle=True, limit=CALIBRATED)
    with console.status("calibrating and factorising"):
        plain = haloc.apply_plan(model, plan)
        aware = haloc.apply_plan(model, plan, moments=haloc.calibrate(model, some, plan.changes()))
    return {
        "dense": model,
        "factorised from its weights": plain,
        "… from its activations": aware,
        "… and fine-tuned": fine_tuned(aware, model, data),
    }


def main() -> None:
    """Inspect, factorise, fine-tune, compare."""
    start = time.perf_counter()
    torch.manual_seed(0)
    try:
        with console.status("reading CIFAR-10 (downloaded the first time, some 140 MB)"):
            data = load_data("cifar10")
    except DataError as error:
        console.print(f"CIFAR-10 cannot be had here, so the digits serve: {error}", markup=False)
        digits.main()
        return
    model, example = haloc.create("resnet20", weights="pretrained"), torch.zeros(1, 3, 32, 32)
    layers = haloc.inspect(model, example)
    plan = haloc.uniform_plan(layers, macs=BUDGET, forms=FORMS, skip=("conv1", "linear"))

    table = Table(title=f"ResNet-20 on CIFAR-10, {TESTED:,} test images")
    for column in ("network", "top-1", "MACs", "params"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for name, network in networks(model, plan, data).items():
        with console.status(f"evaluating: {name}"):
            counted = haloc.inspect(network, example)
            accuracy = haloc.evaluate(network, data.test.batches(250, normalisation=IMAGENET, limit=TESTED))
        macs, params = counted.macs / layers.macs, counted.params / layers.params
        table.add_row(name, f"{accuracy.top1:.1%}", f"{macs:.0%}", f"{params:.0%}")
    console.print(table)
    console.print(f"done in {time.perf_counter() - start:.0f} s, {SETTINGS.epochs * IMAGES:,} images of fine-tuning")


if __name__ == "__main__":
    main()
