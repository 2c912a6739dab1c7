"""A network that knows the digits, and a recipe that compresses it in a second or two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import haloc
from haloc.files import read_json
from haloc.pipeline.listener import Listener
from haloc.pipeline.stamps import file_digest
from haloc.training.settings import TrainSettings
from haloc.zoo.digits import DIGITS, load_digits

#: What a run does in the tests unless they say otherwise; macs are counted, so that every run chooses the same ranks.
OPTIONS: dict[str, Any] = {
    "budget": {"macs": "50%"},
    "space": {"round_to": 4, "forms": ["tucker2", "svd"]},
    "search": {"method": "energy", "activations": 64},
    "recalibrate": {"images": 64},
    "reconstruct": {"epochs": 1, "images": 64, "batch_size": 32},
    "finetune": {"epochs": 2, "lr": 0.01, "warmup_epochs": 0, "save_every_s": 0},
    "export": {"formats": [], "samples": 16},
}
#: What must be the same whatever happened on the way; figures of clocks are not.
DECIDED = ("layers.json", "space.json", "plan.json", "applied/weights.safetensors", "recalibrated/weights.safetensors")
DECIDED += (
    "reconstructed/weights.safetensors",
    "finetuned/weights.safetensors",
    "model/weights.safetensors",
    "model/plan.json",
)


def make() -> nn.Module:
    """Untrained."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


@cache
def _trained() -> dict[str, torch.Tensor]:
    model = make()
    settings = TrainSettings(epochs=4, lr=0.05, warmup_epochs=0)
    haloc.train(model, batches("train", 64, augment=True, shuffle=True), settings=settings)
    return model.state_dict()


def trained() -> nn.Module:
    """A network that is right about 95 times in 100."""
    model = make()
    model.load_state_dict(_trained())
    return model.eval()


def batches(part: str, size: int = 64, **options: Any) -> Any:
    train, test = load_digits()
    images = {"train": train.subset(range(512)), "val": train.subset(range(512, 640)), "test": test}[part]
    return images.batches(size, normalisation=DIGITS, **options)


def data() -> dict[str, Any]:
    return {
        "train": batches("train", augment=True, shuffle=True),
        "val": batches("val", shuffle=True),
        "test": batches("test", limit=200),
    }


def compress(folder: Path, listener: Listener | None = None, **changes: Any) -> haloc.Compressed:
    torch.set_num_threads(1)  # sums come out the same, and test processes run side by side
    options = OPTIONS | data() | {"name": "digits", "listener": listener} | changes
    return haloc.compress(trained(), torch.zeros(1, 1, 8, 8), folder=folder, **options)


def decided(folder: Path) -> dict[str, Any]:
    """What a run came to, apart from times."""
    facts = read_json(folder / "report.json")
    score = next(row for row in facts["figures"] if row["key"] == "score")
    return {name: file_digest(folder / name) for name in DECIDED} | {"score": score, "layers": _counts(facts)}


def _counts(facts: dict[str, Any]) -> list[Any]:
    return [[row["name"], row["form"], row["macs"], row["params"]] for row in facts["layers"]]


class Told(Listener):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.left: dict[str, str] = {}
        self.notes: list[str] = []

    def stage(self, name: str, what: str, place: str) -> None:
        self.begun.append(name)

    def kept(self, name: str, why: str, place: str) -> None:
        self.left[name] = why

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextmanager
    def steps(self, what: str) -> Iterator[Any]:
        yield lambda done, total: None
