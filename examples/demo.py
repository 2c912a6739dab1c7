"""The whole of HALOC so far, in seconds and without a download: scikit-learn's digits, a small CNN, half its MACs.

Run it with ``make demo`` or ``python examples/demo.py``.
"""

from __future__ import annotations

import copy
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import haloc
from haloc.zoo import DIGITS, ImageSource, load_data

BUDGET = 0.5
EPOCHS = 12
console = Console()


def make_model() -> nn.Module:
    """A small CNN for 8×8 grey images."""

    def block(channels_in: int, channels_out: int, stride: int = 1) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(channels_out), nn.ReLU()]

    layers = [*block(1, 32), *block(32, 64), *block(64, 64, stride=2), *block(64, 64)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def train(model: nn.Module, images: ImageSource) -> None:
    """A plain training loop: SGD with Nesterov momentum and a learning rate that falls to zero."""
    batches = images.batches(64, normalisation=DIGITS, augment=True, shuffle=True)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS * len(batches))
    model.train()
    for _ in track(range(EPOCHS), description="training", console=console, transient=True):
        for inputs, labels in batches:
            loss = F.cross_entropy(model(inputs), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()


def factorise(model: nn.Module, plan: haloc.Plan, images: ImageSource) -> dict[str, nn.Module]:
    """One plan three ways: from the weights alone, activation-aware, and with BatchNorm recalibrated."""
    training = images.batches(128, normalisation=DIGITS, augment=True, shuffle=True)
    plain = haloc.apply_plan(model, plan)
    aware = haloc.apply_plan(model, plan, moments=haloc.calibrate(model, training, plan.changes()))
    recalibrated = copy.deepcopy(aware)
    haloc.recalibrate(recalibrated, training)
    return {"weight error alone": plain, "activation-aware": aware, "… and recalibrated": recalibrated}


def show_layers(layers: haloc.Inventory, plan: haloc.Plan) -> None:
    """What each layer is and how the plan writes it."""
    table = Table(title="the network and the plan")
    for column in ("layer", "kind", "open to", "chosen"):
        table.add_column(column)
    for column in ("MACs", "after"):
        table.add_column(column, justify="right")
    for layer in layers:
        form = plan.get(layer.name, haloc.Dense())
        open_to = ", ".join(layer.families) or f"left alone: {layer.reason}"
        table.add_row(layer.name, layer.kind, open_to, str(form), f"{layer.macs:,}", f"{layer.macs_as(form):,}")
    console.print(table)


def main() -> None:
    """Train, inspect, factorise, recalibrate, evaluate."""
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a network this small gains nothing from more, and on a busy machine they wait
    data = load_data("digits")
    model, example = make_model(), torch.zeros(1, 1, 8, 8)
    train(model, data.train)

    layers = haloc.inspect(model, example)
    plan = haloc.uniform_plan(layers, macs=BUDGET, skip=("0",))
    show_layers(layers, plan)

    table = Table(title="before and after, on the test images")
    for column in ("network", "top-1", "MACs", "params"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for name, network in {"dense": model, **factorise(model, plan, data.train)}.items():
        counted = haloc.inspect(network, example)
        accuracy = haloc.evaluate(network, data.test.batches(128, normalisation=DIGITS))
        table.add_row(
            name,
            f"{accuracy.top1:.1%}",
            f"{counted.macs:,} ({counted.macs / layers.macs:.0%})",
            f"{counted.params:,} ({counted.params / layers.params:.0%})",
        )
    console.print(table)
    console.print(f"done in {time.perf_counter() - start:.0f} s, without any fine-tuning")


if __name__ == "__main__":
    main()
