"""Networks of many kinds, small: what is saved, exported and run in the tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from haloc.forms import Spatial, Svd, Tucker2
from haloc.plan import Plan


class Odd(nn.Module):
    """Grouped, dilated, asymmetric and string-padded convolutions, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, (3, 5), padding=(1, 2))
        self.norm = nn.BatchNorm2d(16)
        self.grouped = nn.Conv2d(16, 24, 3, groups=2, padding=1, stride=2, bias=False)
        self.dilated = nn.Conv2d(24, 24, 3, dilation=2, padding="same")
        self.head = nn.Linear(24, 10)
        self.register_buffer("scale", torch.full((10,), 2.0))

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.norm(self.stem(image)).relu()
        hidden = self.dilated(self.grouped(hidden).relu()).mean((2, 3))
        return self.head(hidden) * self.scale


ODD_PLAN = Plan({"stem": Spatial(6), "grouped": Tucker2(8, 4), "dilated": Tucker2(24, 8), "head": Svd(4)})


class Branches(nn.Module):
    """Two inputs, several outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.words = nn.Linear(8, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, image: Tensor, vector: Tensor, scale: Tensor | None = None) -> dict[str, Any]:
        hidden = self.picture(image)
        logits = self.head(hidden.mean((2, 3)) + self.words(vector))
        logits = logits if scale is None else logits * scale
        return {"logits": logits, "maps": (hidden, hidden.amax((2, 3)))}


BRANCHES_PLAN = Plan({"picture.0": Tucker2(8, 3), "words": Svd(4)})


class Tied(nn.Module):
    """Embedding and head share one weight; the layer between can be factorised."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 12)
        self.middle = nn.Linear(12, 12)
        self.head = nn.Linear(12, 20, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.full((6, 6), -torch.inf).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        attention = (hidden @ hidden.mT + self.mask).softmax(-1)
        return self.head(self.middle(attention @ hidden))


class Fixed(nn.Module):
    """Works on batches of four only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(4, 6))


@dataclass
class Answer:
    logits: Tensor
    note: str | None = None


class Answering(nn.Module):
    """Returns a dataclass with something in it that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.layer(x), "fine")


class Deciding(nn.Module):
    """What it computes hangs on the numbers, which torch.export cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 1e9 else x + 1


def images(batch: int = 2, size: int = 16) -> Tensor:
    return torch.linspace(-1, 1, batch * 3 * size * size).reshape(batch, 3, size, size)


def moved(model: nn.Module, *inputs: Tensor) -> nn.Module:
    """The model after a step of training, so that BatchNorms and biases are not what they begin with."""
    optimiser = torch.optim.SGD(model.train().parameters(), lr=0.01)
    outputs = model(*inputs)
    loss = outputs["logits"] if isinstance(outputs, dict) else outputs
    loss.square().mean().backward()
    optimiser.step()
    optimiser.zero_grad()
    return model.eval()
