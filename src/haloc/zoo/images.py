"""Image sets held in memory: normalisation, augmentation, batches and a fixed split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from haloc.errors import DataError, SpecError
from haloc.training.feed import Raw
from haloc.zoo.augment import CropFlip
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
        shift, scale = (values.view(-1, 1, 1) for values in _constants(self, images.device))
        # One subtraction and one product round the same on every device; a division by a number need not.
        return images.float().sub_(shift).mul_(scale)


@cache
def _constants(normalisation: Normalisation, device: torch.device) -> tuple[Tensor, Tensor]:
    """``255 mean`` and ``1 / (255 std)``, kept on the device: a step that is captured must not copy from the host."""
    shift = [255 * mean for mean in normalisation.mean]
    scale = [1 / (255 * std) for std in normalisation.std]
    return torch.tensor(shift, device=device), torch.tensor(scale, device=device)


IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR10 = Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


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

    def on(self, device: torch.device | str) -> Self:
        """Returns the set with its images held on ``device``, where batches are then made."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

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
        reader = _Reader(self.images, self.labels, chosen, seed)
        return Batches(reader, len(self), batch_size, normalise=normalisation, shuffle=shuffle, seed=seed, limit=limit)


@dataclass(frozen=True, eq=False)
class _Reader:
    """Picks images out of the set by their number, and makes random versions of them, on the set's own device."""

    images: Tensor
    labels: Tensor
    augment: CropFlip | None
    seed: int

    @property
    def device(self) -> torch.device:
        """Where the images lie."""
        return self.images.device

    def read(self, order: Tensor, cuts: Sequence[slice], epoch: int) -> Iterator[Raw]:
        """Yields rows of whole numbers: which image, and what was drawn for it."""
        rows = order[:, None]
        if self.augment is not None:
            generator = generator_for(self.seed, epoch, 1)  # not the one that shuffles
            height, width = self.images.shape[2:]
            rows = torch.cat([rows, self.augment.draw(len(order), height, width, generator)], 1)
        rows = rows.to(self.images.device)
        yield from (rows[cut] for cut in cuts)

    def prepare(self, raw: Raw) -> Batch:
        """Returns the images and labels of the rows."""
        rows = raw.to(self.images.device)  # the set may lie elsewhere than where it is trained on
        index = rows[:, 0]
        images = self.images[index] if self.augment is None else self.augment(self.images, index, rows[:, 1:])
        return images.to(raw.device), self.labels[index].to(raw.device)


def with_cutout(images: Any, side: int) -> Any:
    """The set with a square of this side painted black in every image that is augmented; 0 leaves it as it is."""
    if not side:
        return images
    if not isinstance(images, ImageSet):
        raise SpecError("cutout is for images held in memory, such as those of cifar10, not for pictures in a folder")
    return replace(images, augmentation=replace(images.augmentation, cutout=side))


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
