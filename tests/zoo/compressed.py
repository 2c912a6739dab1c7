"""A compressed network in the zoo, for as long as a test takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from haloc.artifact.store import save
from haloc.factor.between import fold_norms, insert_norms
from haloc.factor.surgery import apply_plan
from haloc.forms import Spatial, Svd, Tucker2
from haloc.plan import Plan
from haloc.zoo import DIGITS
from haloc.zoo.registry import ENTRIES, Entry, compressed_entry

#: All kinds of chains, and a full rank that stays one layer.
PLAN = Plan({"0": Tucker2(16, 1), "3": Tucker2(8, 6), "6": Spatial(6), "11": Svd(4)})


def digits_net(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, num_classes),
    )  # fmt: skip


DENSE = Entry("digits_net", digits_net, (1, 8, 8), 10, DIGITS, "digits")


def moved(network: nn.Module, norms: bool = False) -> nn.Module:
    """The network after a step of training, with or without BatchNorms between its factors."""
    if norms:
        insert_norms(network, [name for name, module in network.named_modules() if hasattr(module, "in_channels")])
    optimiser = torch.optim.SGD(network.train().parameters(), lr=0.01)
    network(torch.randn(8, 1, 8, 8)).square().mean().backward()
    optimiser.step()
    fold_norms(network)
    return network.eval()


def register(monkeypatch: pytest.MonkeyPatch, folder: Path, norms: bool = True) -> nn.Module:
    """Makes ``digits_net`` and ``digits_net-haloc`` names of the zoo; returns the network saved under the latter."""
    small = moved(apply_plan(digits_net(), PLAN), norms)
    assert (small[3][0].bias is not None) == norms
    save(folder, small)
    monkeypatch.setitem(ENTRIES, "digits_net", DENSE)
    monkeypatch.setitem(ENTRIES, "digits_net-haloc", compressed_entry("digits_net-haloc", DENSE, folder))
    return small
