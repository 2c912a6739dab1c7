"""Image sets held in memory: normalisation, augmentation, batches and a fixed split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from haloc.errors import DataError, SpecError
from haloc.zoo.batches import Batch, Batches, generator_for, require_seed


@dataclass(frozen=True)
class Normalisation:
    """Maps uint8 pixels to ``(pixel / 255 - mean) / std``, channel by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.mean or len(self.mean) != len(self.std) or min(self.std) <= 0:
            raise SpecError(
                f"a normalisation needs a mean and a positive std for every channel, "
                f"got mean={self.mean} and std={self.std}"
            )

    def __call__(self, images: Tensor) -> Tensor:
        """Returns uint8 images (N, C, H, W) as normalised float32 images."""
        channels = images.shape[1]
        # Broadcasting would otherwise make three channels out of one without a word.
        if channels != len(self.mean):
            raise SpecError(f"this normalisation is for images of {len(self.mean)} channels, got images of {channels}")
        mean = torch.tensor(self.mean, device=images.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=images.device).view(-1, 1, 1)
        return images.float().div_(255).sub_(mean).div_(std)


IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR10 = Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@dataclass(frozen=True)
class CropFlip:
    """A random crop of the padded image, as large as the image was, flipped left to right at random.

    The padding is black and comes before normalisation. That matters beyond taste: BatchNorm statistics of
    networks trained so do not fit plain or grey-padded images, and recalibrating a CIFAR ResNet-20 on those
    costs it three points of accuracy.
    """

    padding: int = 4
    flip: bool = True

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Returns a random version of every image of a batch (N, C, H, W)."""
        count, _, height, width = images.shape
        top, left = torch.randint(2 * self.padding + 1, (2, count), generator=generator).to(images.device)
        flipped = (torch.rand(count, generator=generator) < 0.5).to(images.device)
        windows = F.pad(images, (self.padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
        crops = windows[torch.arange(count, device=images.device), :, top, left]
        if not self.flip:
            return crops
        return torch.where(flipped.view(-1, 1, 1, 1), crops.flip(3), crops)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images held in memory, with their labels.

    Attributes:
        images: uint8 (N, C, H, W).
        labels: int64 (N,), indices into ``classes``.
        classes: the names of the classes.
        augmentation: what ``augment=True`` means for these images.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    augmentation: CropFlip = field(default=CropFlip())

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise DataError(
                f"images must be a uint8 tensor (N, C, H, W), got {self.images.dtype} of shape "
                f"{tuple(self.images.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise DataError(
                f"labels must be an int64 tensor of {len(self.images)} values, got {self.labels.dtype} of "
                f"shape {tuple(self.labels.shape)}"
            )
        if len(self) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.classes):
            raise DataError(f"labels must lie from 0 to {len(self.classes) - 1}, the number of classes less 1")

    def __len__(self) -> int:
        return len(self.images)

    def subset(self, indices: Tensor | NDArray[np.int64] | Sequence[int]) -> Self:
        """Returns the images at ``indices``, in that order."""
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.images.device)
        return replace(self, images=self.images[chosen], labels=self.labels[chosen])

    def batches(
        self,
        batch_size: int,
        *,
        normalisation: Normalisation,
        augment: CropFlip | bool | None = None,
        shuffle: bool = False,
        seed: int = 0,
        limit: int | None = None,
    ) -> Batches:
        """Returns the images as normalised batches; ``limit`` takes the first so many of the order.

        ``augment=True`` stands for this set's own ``augmentation``.
        """
        chosen = self.augmentation if augment is True else augment or None
        read = partial(self._read, chosen, seed)
        return Batches(read, len(self), batch_size, normalise=normalisation, shuffle=shuffle, seed=seed, limit=limit)

    def _read(self, augment: CropFlip | None, seed: int, batches: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        generator = generator_for(seed, epoch, 1)  # not the one that shuffles
        for indices in batches:
            chosen = indices.to(self.images.device)
            images = self.images[chosen]
            yield augment(images, generator) if augment else images, self.labels[chosen]


class Splittable(Protocol):
    """What can be split: it has labels, and subsets of its own kind."""

    @property
    def labels(self) -> Tensor:
        """The class of every image."""

    def subset(self, indices: NDArray[np.int64]) -> Self:
        """Returns the images at ``indices``."""


S = TypeVar("S", bound=Splittable)


def split(images: S, fraction: float, seed: int = 0) -> tuple[S, S]:
    """Returns ``(rest, held_out)``, with ``fraction`` of every class held out.

    A class of two images or more has at least one on either side. The draw is NumPy's ``RandomState``, whose
    algorithm is frozen: the same seed splits the same way on every machine.
    """
    if not 0 < fraction < 1:
        raise SpecError(f"the fraction held out must lie between 0 and 1, got {fraction}")
    require_seed(seed)
    held = _held_out(images.labels.cpu().numpy(), fraction, np.random.RandomState(seed))
    return images.subset(np.flatnonzero(~held)), images.subset(np.flatnonzero(held))


def _held_out(labels: NDArray[np.int64], fraction: float, random: np.random.RandomState) -> NDArray[np.bool_]:
    held = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        count = min(max(round(fraction * len(members)), 1), len(members) - 1)
        held[members[:count]] = True
    return held
