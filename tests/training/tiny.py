"""A network and data so small that a whole run takes a fraction of a second."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from haloc.files import read_json
from haloc.training.checkpoint import Checkpoint, Store
from haloc.training.settings import TrainSettings
from haloc.zoo.batches import Batches
from haloc.zoo.digits import DIGITS, load_digits
from haloc.zoo.images import ImageSet

#: Saves wherever it may: after every epoch, and within one as often as the run looks up.
SETTINGS = TrainSettings(epochs=3, lr=0.05, warmup_epochs=1.0, save_every_s=0)
TIMINGS = ("seconds", "images_per_s")


@cache
def digits() -> tuple[ImageSet, ImageSet]:
    return load_digits()


def batches(size: int = 16, images: int = 96, **options: Any) -> Batches:
    options = {"shuffle": True, "augment": True, "seed": 1, **options}
    return digits()[0].subset(range(images)).batches(size, normalisation=DIGITS, **options)


def held_out(size: int = 50, images: int = 120) -> Batches:
    return digits()[1].subset(range(images)).batches(size, normalisation=DIGITS)


def network(seed: int = 0, *, norm: bool = True, dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Dropout(dropout), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Bit for bit, and neither has more than the other."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def same_weights(left: nn.Module, right: nn.Module) -> bool:
    return same(left.state_dict(), right.state_dict())


def difference(left: nn.Module, right: nn.Module) -> float:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what depends on the machine's mood."""
    return [{name: value for name, value in row.items() if name not in TIMINGS} for row in history]


def newest(folder: Path) -> Checkpoint:
    """What the run in the folder would go on from."""
    last = max((folder / "checkpoints").glob("step-*"))
    found = Store(last.parent).newest(read_json(last / "state.json")["config"])
    assert found is not None
    return found
