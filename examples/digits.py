"""From scratch in seconds and without a download: train a small CNN on scikit-learn's digits, halve it, recover it.

Run it with ``python examples/digits.py``.
"""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import haloc
from haloc.zoo import DIGITS, load_data

BUDGET = 0.3
TRAINING = haloc.TrainSettings(epochs=12, lr=0.05, weight_decay=1e-4, warmup_epochs=1)
RECOVERING = haloc.TrainSettings(epochs=6, lr=0.02, weight_decay=1e-4, warmup_epochs=0.5)
console = Console()


def make_model() -> nn.Module:
    """A small CNN for 8×8 grey images."""

    def block(channels_in: int, channels_out: int, stride: int = 1) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(channels_out), nn.ReLU()]

    layers = [*block(1, 32), *block(32, 64), *block(64, 64, stride=2), *block(64, 64)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def say(progress: haloc.Progress) -> None:
    """A line for every third epoch."""
    if progress.ended and round(progress.epoch) % 3 == 0:
        console.print(f"  epoch {progress.epoch:.0f} of {progress.epochs}: loss {progress.figures['loss']:.3f}")


def main() -> None:
    """Train, factorise, fine-tune, compare."""
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a network this small gains nothing from more, and on a busy machine they wait
    data = load_data("digits")
    training = data.train.batches(64, normalisation=DIGITS, augment=True, shuffle=True)
    testing = data.test.batches(128, normalisation=DIGITS)

    console.print("training a small CNN")
    model, example = make_model(), torch.zeros(1, 1, 8, 8)
    haloc.train(model, training, settings=TRAINING, on_progress=say)

    layers = haloc.inspect(model, example)
    plan = haloc.uniform_plan(layers, macs=BUDGET, skip=("0",))
    moments = haloc.calibrate(model, training, plan.changes())
    small = haloc.apply_plan(model, plan, moments=moments)
    scores = {"dense": haloc.evaluate(model, testing).top1, "factorised": haloc.evaluate(small, testing).top1}

    console.print(f"fine-tuning it with {layers.macs_of(plan) / layers.macs:.0%} of its MACs")
    haloc.finetune(small, training, teacher=model, settings=RECOVERING, on_progress=say)
    scores["fine-tuned"] = haloc.evaluate(small, testing).top1

    table = Table(title="on the test images")
    table.add_column("network")
    table.add_column("top-1", justify="right")
    for name, top1 in scores.items():
        table.add_row(name, f"{top1:.1%}")
    console.print(table)
    console.print(f"done in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
