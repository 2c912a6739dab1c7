"""Your own task, from end to end: a small U-Net that marks shapes in pictures, compressed by its own loss and metric.

Everything that HALOC is told about the task stands in this file: a model, loaders, a loss and a score. The pictures are
drawn from a seed, so there is nothing to download. Run it with ``python examples/segmentation.py``, or as a recipe that
names ``segmentation:make_model``, ``segmentation:make_loaders``, ``segmentation:loss`` and ``segmentation:score``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import haloc

CLASSES = ("background", "disc", "square", "cross")
SIZE = 24
IMAGES = {"train": 384, "val": 128, "test": 256}
BATCH = 16
BUDGET: dict[str, str | float] = {"macs": "35%"}
SPACE: dict[str, Any] = {"round_to": 8}
TRAINING = haloc.TrainSettings(epochs=8, lr=0.1, weight_decay=1e-4, warmup_epochs=1)
SEARCH: dict[str, Any] = {"method": "sensitivity", "activations": 128, "settings": {"images": 32}}
RECOVERING: dict[str, Any] = {"epochs": 3, "lr": 0.03, "warmup_epochs": 0.5}
EXPORT: dict[str, Any] = {"formats": ["onnx"]}
console = Console()


class UNet(nn.Module):
    """Down twice, up twice, with a connection across at every scale; logits of a class for every pixel."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = _block(3, width), _block(width, 2 * width)
        self.middle = _block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.across2 = _block(4 * width, 2 * width)
        self.up1 = nn.Conv2d(2 * width, width, 3, padding=1)
        self.across1 = _block(2 * width, width)
        self.head = nn.Conv2d(width, len(CLASSES), 1)

    def forward(self, images: Tensor) -> Tensor:
        """Returns (batch, classes, height, width)."""
        fine = self.down1(images)
        coarse = self.down2(F.max_pool2d(fine, 2))
        deep = self.middle(F.max_pool2d(coarse, 2))
        coarse = self.across2(torch.cat([self.up2(deep), coarse], 1))
        larger = F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        fine = self.across1(torch.cat([self.up1(larger), fine], 1))
        logits: Tensor = self.head(fine)
        return logits


def _block(channels_in: int, channels_out: int) -> nn.Sequential:
    def layer(given: int) -> list[nn.Module]:
        return [nn.Conv2d(given, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()]

    return nn.Sequential(*layer(channels_in), *layer(channels_out))


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures with one shape of every kind, somewhere; and the class of every pixel."""
    random = torch.Generator().manual_seed(seed)
    places = torch.arange(SIZE).float()
    rows, columns = places[None, :, None], places[None, None, :]
    classes = torch.zeros(count, SIZE, SIZE, dtype=torch.long)
    images = 0.35 * torch.randn(count, 3, SIZE, SIZE, generator=random)
    for kind in (1, 2, 3):
        middle = SIZE * (0.2 + 0.6 * torch.rand(2, count, 1, 1, generator=random))
        down, right = (rows - middle[0]).abs(), (columns - middle[1]).abs()
        radius = SIZE * (0.1 + 0.08 * torch.rand(count, 1, 1, generator=random))
        inside = {
            1: down.square() + right.square() <= radius.square(),
            2: torch.maximum(down, right) <= 0.9 * radius,
            3: (torch.minimum(down, right) <= 0.35 * radius) & (torch.maximum(down, right) <= 1.2 * radius),
        }[kind]
        colour = 0.6 + 0.4 * torch.rand(count, 3, 1, 1, generator=random)
        images = torch.where(inside[:, None], 0.5 * images + colour, images)
        classes[inside] = kind
    return images, classes


def make_model() -> nn.Module:
    """A U-Net, not trained."""
    torch.manual_seed(0)
    return UNet()


@cache
def make_loaders() -> Mapping[str, DataLoader[Any]]:
    """Loaders of ``(images, classes)``: training, held-out for the search, and test pictures."""
    found = {}
    for seed, (name, count) in enumerate(IMAGES.items()):
        shuffled = {"shuffle": True, "generator": torch.Generator().manual_seed(seed)} if name == "train" else {}
        found[name] = DataLoader(TensorDataset(*draw(count, seed)), BATCH, **shuffled)
    return found


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Cross-entropy of every pixel, and one minus the Dice overlap of every class."""
    images, classes = batch
    logits = model(images)
    chances, wanted = logits.softmax(1), F.one_hot(classes, len(CLASSES)).movedim(-1, 1)
    common, both = (chances * wanted).sum((0, 2, 3)), (chances + wanted).sum((0, 2, 3))
    return {"pixels": F.cross_entropy(logits, classes), "dice": 1 - (2 * common / (both + 1e-6)).mean()}


def score(model: nn.Module) -> float:
    """Mean intersection over union on the test pictures, the mean over all classes."""
    common, union = torch.zeros(len(CLASSES)), torch.zeros(len(CLASSES))
    device = next((weight.device for weight in model.parameters()), "cpu")  # an exported network shows no weights
    for images, classes in make_loaders()["test"]:
        found = model(images.to(device)).argmax(1).cpu()
        for kind in range(len(CLASSES)):
            common[kind] += ((found == kind) & (classes == kind)).sum()
            union[kind] += ((found == kind) | (classes == kind)).sum()
    return float((common / union.clamp(min=1)).mean())


def compressed(model: nn.Module, folder: str) -> haloc.Compressed:
    """All that there is to do, once there is a model, loaders, a loss and a score."""
    loaders = make_loaders()
    return haloc.compress(
        model,
        torch.zeros(1, 3, SIZE, SIZE),
        budget=BUDGET,
        train=loaders["train"],
        val=loaders["val"],
        loss=loss,
        score=score,
        space=SPACE,
        search=SEARCH,
        finetune=RECOVERING,
        export=EXPORT,
        folder=folder,
    )


def main(folder: str = "runs/segmentation") -> None:
    """Train, compress, compare."""
    start = time.perf_counter()
    torch.set_num_threads(1)  # a network this small gains nothing from more, and on a busy machine they wait
    console.print("training a small U-Net")
    model = make_model()
    haloc.train(model, make_loaders()["train"], loss=loss, settings=TRAINING)
    small, report = compressed(model, folder)
    example = torch.zeros(1, 3, SIZE, SIZE)
    before, after = haloc.inspect(model, example).macs, haloc.inspect(small, example).macs
    console.print(f"MACs      {before:,} → {after:,} ({after / before:.0%})")
    with torch.no_grad():
        console.print(f"mean IoU  {score(model.eval()):.3f} → {score(small.eval()):.3f}")
    console.print(f"the report is {report.page} ({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
