"""A network with several outputs, from end to end: a small detector with heads at two scales.

It finds shapes in pictures and says where they are. A batch is a dict with names of its own, so a function
takes the model's inputs out of it. The network returns a dict of four tensors, the loss looks at all of them, and the
score is the F1 of the boxes found. The pictures are drawn from a seed, so there is nothing to download. Run it with
``python examples/detector.py``, or as a recipe that names ``detector:make_model``, ``detector:make_loaders``,
``detector:loss``, ``detector:score`` and ``detector:inputs``.
"""

from __future__ import annotations

import time
from functools import cache
from math import exp
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import haloc

KINDS = ("disc", "square", "cross")
SIZE = 48
#: Pixels from one cell to the next, and between which sizes an object is looked for there.
STRIDES, SIZES = {"fine": 4, "coarse": 8}, {"fine": (0, 12), "coarse": (12, SIZE)}
OBJECTS = 3
IMAGES = {"train": 768, "val": 128, "test": 192}
BATCH = 16
BUDGET: dict[str, str | float] = {"macs": "35%"}
SPACE: dict[str, Any] = {"round_to": 16}
TRAINING = haloc.TrainSettings(epochs=10, lr=0.02, weight_decay=1e-4, warmup_epochs=1)
SEARCH: dict[str, Any] = {"method": "sensitivity", "activations": 128, "settings": {"images": 32}}
RECOVERING: dict[str, Any] = {"epochs": 3, "lr": 0.01, "warmup_epochs": 0.5}
EXPORT: dict[str, Any] = {"formats": ["onnx"]}
console = Console()

Batch = dict[str, Tensor]
#: Its middle, across and down, and its size, in pixels.
Box = list[float]


class Detector(nn.Module):
    """A backbone and, at each of two scales, a head for classes (the last is "nothing here") and one for boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_layer(3, 16, 2), *_layer(16, 32))
        self.fine = nn.Sequential(*_layer(32, 48, 2), *_layer(48, 48))
        self.coarse = nn.Sequential(*_layer(48, 64, 2), *_layer(64, 64))
        self.fine_neck, self.coarse_neck = nn.Sequential(*_layer(48, 48)), nn.Sequential(*_layer(64, 48))
        self.fine_classes, self.coarse_classes = (nn.Conv2d(48, len(KINDS) + 1, 1) for _ in STRIDES)
        self.fine_boxes, self.coarse_boxes = (nn.Conv2d(48, 4, 1) for _ in STRIDES)
        for head in (self.fine_classes, self.coarse_classes):
            nn.init.constant_(head.bias[-1:], 3.0)  # most cells have nothing in them

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        """Returns logits (batch, kinds + 1, rows, columns) and boxes (batch, 4, rows, columns) of both scales.

        A box is how far its middle is from the cell's, and the logarithm of its size, all in cells.
        """
        fine = self.fine(self.stem(pictures))
        near, far = self.fine_neck(fine), self.coarse_neck(self.coarse(fine))
        return {
            "fine_classes": self.fine_classes(near), "fine_boxes": self.fine_boxes(near),
            "coarse_classes": self.coarse_classes(far), "coarse_boxes": self.coarse_boxes(far),
        }  # fmt: skip


def _layer(channels_in: int, channels_out: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
    return [conv, nn.BatchNorm2d(channels_out), nn.ReLU()]


def draw(count: int, seed: int) -> list[Batch]:
    """Noisy pictures with up to three shapes, of which kind (−1: none), and their boxes (middle and size in pixels)."""
    random = torch.Generator().manual_seed(seed)
    places = torch.arange(SIZE) + 0.5
    rows, columns = places[None, :, None], places[None, None, :]
    pictures = 0.2 * torch.randn(count, 3, SIZE, SIZE, generator=random)
    quarters = torch.rand(count, 4, generator=random).argsort(1)  # every shape has a quarter of the picture to itself
    kinds = torch.randint(len(KINDS), (count, OBJECTS), generator=random)
    kinds[:, 1:][torch.rand(count, OBJECTS - 1, generator=random) < 0.5] = -1
    boxes = torch.zeros(count, OBJECTS, 4)
    for number in range(OBJECTS):
        half = 3 + 6 * torch.rand(count, 1, 1, generator=random)
        corner = torch.stack([quarters[:, number] // 2, quarters[:, number] % 2])[..., None, None] * SIZE / 2
        middle = corner + half + (SIZE / 2 - 2 * half) * torch.rand(2, count, 1, 1, generator=random)
        down, right = (rows - middle[0]).abs(), (columns - middle[1]).abs()
        shapes = [
            down.square() + right.square() <= half.square(),
            torch.maximum(down, right) <= half,
            (torch.minimum(down, right) <= 0.35 * half) & (torch.maximum(down, right) <= half),
        ]
        inside = sum(shape & (kinds[:, number] == kind)[:, None, None] for kind, shape in enumerate(shapes)) > 0
        colour = 0.5 + 0.5 * torch.rand(count, 3, 1, 1, generator=random)
        pictures = torch.where(inside[:, None], 0.5 * pictures + colour, pictures)
        boxes[:, number] = torch.stack([middle[1], middle[0], 2 * half, 2 * half], -1).flatten(1)
    return [{"picture": p, "kinds": k, "boxes": b} for p, k, b in zip(pictures, kinds, boxes, strict=True)]


def make_model() -> nn.Module:
    """A detector, not trained."""
    torch.manual_seed(0)
    return Detector()


@cache
def make_loaders() -> dict[str, DataLoader[Any]]:
    """Loaders of dicts: training, held-out for the search, and test pictures."""
    found = {}
    for seed, (name, count) in enumerate(IMAGES.items()):
        shuffled = {"shuffle": True, "generator": torch.Generator().manual_seed(seed)} if name == "train" else {}
        found[name] = DataLoader(draw(count, seed), BATCH, **shuffled)  # type: ignore[arg-type]
    return found


def inputs(batch: Batch) -> Tensor:
    """What of a batch the model is called with."""
    return batch["picture"]


def loss(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """What there is in every cell, and for cells with an object where it is, at both scales."""
    outputs, terms = model(batch["picture"]), {}
    for scale, stride in STRIDES.items():
        classes, boxes = targets(batch, scale, stride)
        there = classes < len(KINDS)
        cells = there.sum() + 1
        apart = F.smooth_l1_loss(outputs[f"{scale}_boxes"], boxes, reduction="none", beta=0.1).sum(1)
        terms[f"{scale}_classes"] = F.cross_entropy(outputs[f"{scale}_classes"], classes, reduction="sum") / cells
        terms[f"{scale}_boxes"] = (apart * there).sum() / cells
    return terms


def targets(batch: Batch, scale: str, stride: int) -> tuple[Tensor, Tensor]:
    """What the heads of a scale should say: cells near the middle of an object of the scale's size tell about it."""
    kinds, middle, size = batch["kinds"], batch["boxes"][..., :2], batch["boxes"][..., 2:]
    smallest, largest = SIZES[scale]
    here = (kinds >= 0) & (size[..., 0] > smallest) & (size[..., 0] <= largest)
    cells = stride * (torch.arange(SIZE // stride, device=kinds.device) + 0.5)
    near = (cells - middle[..., None]).abs() <= (size / 4).clamp(min=stride / 2)[
        ..., None
    ]  # (batch, object, x or y, cell)
    inside = here[..., None, None] & near[:, :, 1, :, None] & near[:, :, 0, None, :]
    which = inside.float().argmax(1).flatten(1)  # the first object that a cell is near to
    classes = torch.where(inside.any(1), kinds.gather(1, which).view_as(inside[:, 0]), len(KINDS))
    x, y, wide, high = batch["boxes"].gather(1, which[..., None].expand(-1, -1, 4)).view(*classes.shape, 4).unbind(-1)
    places = [(x - cells) / stride, (y - cells[:, None]) / stride]
    return classes, torch.stack([*places, (wide / stride).log(), (high / stride).log()], 1)


def score(model: nn.Module) -> float:
    """F1 on the test pictures: a box is right that overlaps an object of its kind by half or more."""
    right = found = wanted = 0
    device = next((weight.device for weight in model.parameters()), "cpu")  # an exported network shows no weights
    for batch in make_loaders()["test"]:
        outputs = {name: output.cpu() for name, output in model(batch["picture"].to(device)).items()}
        truths = zip(batch["kinds"].tolist(), batch["boxes"].tolist(), strict=True)
        for number, (kinds, boxes) in enumerate(truths):
            said = detections({name: output[number] for name, output in outputs.items()})
            left = [(kind, box) for kind, box in zip(kinds, boxes, strict=True) if kind >= 0]
            found, wanted = found + len(said), wanted + len(left)
            for kind, box in said:
                hits = [each for each in left if each[0] == kind and overlap(each[1], box) >= 0.5]
                if hits:
                    right += 1
                    left.remove(hits[0])
    return 2 * right / max(found + wanted, 1)


def detections(outputs: dict[str, Tensor]) -> list[tuple[int, Box]]:
    """The objects in one picture, the surest first, without those that a surer one of their kind covers."""
    candidates: list[tuple[float, int, Box]] = []
    for scale, stride in STRIDES.items():
        chances = outputs[f"{scale}_classes"].softmax(0)
        for row, column in (chances[-1] < 0.5).nonzero().tolist():
            chance, kind = chances[:-1, row, column].max(0)
            right, down, wide, high = outputs[f"{scale}_boxes"][:, row, column].tolist()
            place = [column + 0.5 + right, row + 0.5 + down, exp(wide), exp(high)]
            candidates.append((float(chance), int(kind), [stride * cells for cells in place]))
    kept: list[tuple[int, Box]] = []
    for _, kind, box in sorted(candidates, reverse=True):
        if all(kind != other or overlap(box, before) < 0.5 for other, before in kept):
            kept.append((kind, box))
    return kept


def overlap(one: Box, other: Box) -> float:
    """Intersection over union of two boxes."""
    sides = [
        min(one[axis] + one[axis + 2] / 2, other[axis] + other[axis + 2] / 2)
        - max(one[axis] - one[axis + 2] / 2, other[axis] - other[axis + 2] / 2)
        for axis in (0, 1)
    ]
    common = max(sides[0], 0.0) * max(sides[1], 0.0)
    return common / (one[2] * one[3] + other[2] * other[3] - common)


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
        inputs=inputs,
        space=SPACE,
        search=SEARCH,
        finetune=RECOVERING,
        export=EXPORT,
        folder=folder,
    )


def main(folder: str = "runs/detector") -> None:
    """Train, compress, compare."""
    start = time.perf_counter()
    torch.set_num_threads(1)  # a network this small gains nothing from more, and on a busy machine they wait
    console.print("training a small detector")
    model = make_model()
    haloc.train(model, make_loaders()["train"], loss=loss, settings=TRAINING)
    small, report = compressed(model, folder)
    example = torch.zeros(1, 3, SIZE, SIZE)
    before, after = haloc.inspect(model, example).macs, haloc.inspect(small, example).macs
    console.print(f"MACs  {before:,} → {after:,} ({after / before:.0%})")
    with torch.no_grad():
        console.print(f"F1    {score(model.eval()):.3f} → {score(small.eval()):.3f}")
    console.print(f"the report is {report.page} ({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
