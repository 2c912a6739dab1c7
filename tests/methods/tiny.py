"""A small network for the digits, three of its layers open to three forms each, and a search that takes a second."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from haloc.cost.count import Count
from haloc.factor.inspect import inspect
from haloc.methods.haloc_settings import SearchSettings
from haloc.methods.search import SearchResult, search
from haloc.methods.supernet import choices, draw_paths, supernet
from haloc.space import Grid, LayerChoices, RankSpace
from haloc.training.baseline import train
from haloc.training.session import Session, join_session
from haloc.training.settings import TrainSettings
from haloc.zoo.batches import Batches
from haloc.zoo.digits import DIGITS, load_digits
from haloc.zoo.images import split

IMAGE = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8)
OPEN = ("conv2", "conv3", "conv4")
MACS = Count("macs")

#: As the paper describes the search, where the defaults are other ones.
PAPER: dict[str, Any] = {"start": "alike", "weights": "own", "alpha_every": 1, "rounds": 0}


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = {
        "conv1": nn.Conv2d(1, 8, 3, padding=1), "norm1": nn.BatchNorm2d(8), "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(8, 16, 3, padding=1), "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2),
        "conv3": nn.Conv2d(16, 16, 3, padding=1), "relu3": nn.ReLU(),
        "conv4": nn.Conv2d(16, 16, 3, padding=1, bias=False), "relu4": nn.ReLU(),
        "flat": nn.Flatten(), "fc": nn.Linear(256, 10),
    }  # fmt: skip
    return nn.Sequential(OrderedDict(layers))


def rank_space_of(model: nn.Module) -> RankSpace:
    """Dense, a middling rank and rank 1 for three layers; the others have nothing to choose."""
    grids = (Grid.of("tucker2", [(1, 1), (6, 6)]),)
    layers = inspect(model, IMAGE)
    return RankSpace({layer.name: LayerChoices(layer.calls, grids if layer.name in OPEN else ()) for layer in layers})


def batches() -> tuple[Batches, Batches]:
    """Training and held-out batches."""
    rest, held = split(load_digits()[0], 0.5)
    own, other = (images.batches(64, normalisation=DIGITS, shuffle=True, seed=7) for images in (rest, held))
    return own, other


@cache
def _trained() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model = network()
    train(model, batches()[0], settings=TrainSettings(epochs=12, lr=0.1, warmup_epochs=1))
    return model.state_dict()


def trained() -> nn.Module:
    """A network that knows the digits."""
    model = network()
    model.load_state_dict(_trained())
    return model


def find(
    model: nn.Module,
    budget: Any = 0.5,
    *,
    epochs: int = 2,
    seed: int = 0,
    minutes: float | None = None,
    **options: Any,
) -> SearchResult:
    """A search on the digits; ``options`` are of `SearchSettings` where it knows them, and of `search` otherwise."""
    own = {name: options.pop(name) for name in list(options) if name in SearchSettings.__dataclass_fields__}
    settings = SearchSettings(**PAPER | {"warmup_epochs": 0, "alpha_lr": 0.05} | own)
    training = TrainSettings(epochs=epochs, lr=0.01, warmup_epochs=0, seed=seed, minutes=minutes)
    own_batches, held = batches()
    space = rank_space_of(model)
    return search(
        model, space, budget=budget, train=own_batches, val=held, settings=settings, training=training, **options
    )


def restored(weights: str | Path) -> nn.Module:
    model = network()
    model.load_state_dict(torch.load(weights))
    return model


def paths(weights: str, steps: int) -> list[list[int]]:
    """The paths of the first steps, for another process to compare."""
    model = restored(weights)
    net = supernet(model, rank_space_of(model))
    found = []
    for step in range(steps):
        draw_paths(net, step, seed=3)
        found.append([choice.active for choice in choices(net).values()])
    return found


def probabilities(weights: str, session: Session | None = None) -> dict[str, list[float]]:
    """What a short search ends with, to the last bit."""
    torch.set_num_threads(1)
    return find(restored(weights), epochs=1, session=session).evidence.probabilities


def searched_together(weights: str, folder: Path) -> None:
    """One of two processes that search; it leaves what it found."""
    joined, _ = join_session("cpu")
    found = probabilities(weights, joined)
    Path(folder, f"{joined.shard.rank}.json").write_text(json.dumps(found))
    joined.leave()


def finalists_together(weights: str, folder: Path) -> None:
    """One of two processes that search, try finalists, and do it again, when only the first has notes of them."""
    torch.set_num_threads(1)
    joined, _ = join_session("cpu")
    options = {"finalists": 2, "trial_epochs": 1, "images": 64, "session": joined, "folder": folder / "search"}
    found = [find(restored(weights), epochs=1, **options).evidence.probabilities for _ in range(2)]
    Path(folder, f"{joined.shard.rank}.json").write_text(json.dumps(found))
    joined.leave()
