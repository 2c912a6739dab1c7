"""A task that is no classification: a network with two answers, batches with names of their own, a loss and a score."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from haloc.factor.inspect import inspect
from haloc.space import Grid, LayerChoices, RankSpace
from haloc.training.baseline import train
from haloc.training.settings import TrainSettings

OPEN = ("conv2", "conv3")
PICTURE = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8)
Batch = dict[str, Tensor]


@dataclass
class Answer:
    """The quarter that is lit and how brightly; and what nobody compares."""

    quarter: Tensor
    more: dict[str, list[Tensor]]


class Twofold(nn.Module):
    """Says in which quarter of a picture there is light, and how much; takes its second input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.conv3, self.norm3 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.quarter, self.light = nn.Linear(64, 4), nn.Linear(64, 1)

    def forward(self, picture: Tensor, *, gain: Tensor | None = None) -> Answer:
        hidden = F.max_pool2d(self.norm(self.conv1(picture)).relu(), 2)
        hidden = F.max_pool2d(self.norm3(self.conv3(self.conv2(hidden).relu())).relu(), 2).flatten(1)
        light = self.light(hidden)
        light = light if gain is None else light * gain[:, None]
        return Answer(self.quarter(hidden), {"light": [light], "rows": [torch.arange(len(picture))]})


def batch(size: int, seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    pictures = 0.3 * torch.randn(size, 1, 8, 8, generator=random)
    quarters, light = torch.randint(4, (size,), generator=random), 0.5 + torch.rand(size, generator=random)
    for picture, quarter, bright in zip(pictures, quarters.tolist(), light, strict=True):
        top, left = 4 * (quarter // 2), 4 * (quarter % 2)
        picture[0, top : top + 4, left : left + 4] += bright
    return {"picture": pictures, "quarter": quarters, "light": light, "gain": torch.ones(size)}


def batches(count: int = 6, seed: int = 0, size: int = 32) -> list[Batch]:
    return [batch(size, 100 * seed + number) for number in range(count)]


def inputs(batch: Batch) -> dict[str, Tensor]:
    return {"picture": batch["picture"], "gain": batch["gain"]}


def loss(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    answer = model(batch["picture"], gain=batch["gain"])
    (light,) = answer.more["light"]
    return {
        "quarters": F.cross_entropy(answer.quarter.float(), batch["quarter"]),
        "lights": F.mse_loss(light[:, 0].float(), batch["light"]),
    }


def score(model: nn.Module) -> float:
    assert not model.training
    assert not torch.is_grad_enabled()
    held = batch(200, 77)
    return float((model(held["picture"]).quarter.argmax(1) == held["quarter"]).float().mean())


def network(seed: int = 0) -> Twofold:
    torch.manual_seed(seed)
    return Twofold()


@cache
def _trained() -> Twofold:
    torch.set_num_threads(1)
    model = network()
    train(model, batches(), loss=loss, settings=TrainSettings(epochs=10, lr=0.005, warmup_epochs=1))
    return model.eval()


def trained() -> Twofold:
    model = network()
    model.load_state_dict(_trained().state_dict())
    return model.eval()


def rank_space_of(model: nn.Module) -> RankSpace:
    """Dense, a middling rank and rank 1 for two layers; the others have nothing to choose."""
    grids, layers = (Grid.of("tucker2", [(1, 1), (6, 6)]),), inspect(model, PICTURE)
    return RankSpace({layer.name: LayerChoices(layer.calls, grids if layer.name in OPEN else ()) for layer in layers})
